"""Guards are kept as data, or there is an obstacle that says why not."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch._dynamo.source import GlobalSource, LocalSource, RandomValueSource

from piecewise_backend.runner.description import Describer
from piecewise_backend.runner.guard_record import GuardRecord
from piecewise_backend.runner.places import Places


def _guard(kind: str, source: Any) -> Any:
    guard = SimpleNamespace(originating_source=source, create_fn=None)
    return SimpleNamespace(guard_type=kind, name="it", has_value=False, value=None, orig_guard=guard)


@pytest.mark.parametrize(
    ("kind", "source", "what"),
    [
        ("A_NEW_KIND", LocalSource("model"), "a guard of kind A_NEW_KIND"),
        ("ID_MATCH", LocalSource("model"), "a builtins.object"),
        ("TYPE_MATCH", GlobalSource("unknown"), "the global 'unknown'"),
        ("TYPE_MATCH", RandomValueSource(0), "a RandomValueSource"),
    ],
)
def test_a_guard_that_cannot_be_kept_is_an_obstacle_that_names_it(kind: str, source: Any, what: str) -> None:
    record = GuardRecord(Places({"model": object()}), Describer(), {})
    assert record.record([_guard("TYPE_MATCH", LocalSource("model"))]) == [False]
    assert record.obstacle is None
    assert record.record([_guard(kind, source)]) == [False]
    assert record.obstacle is not None
    assert what in record.obstacle

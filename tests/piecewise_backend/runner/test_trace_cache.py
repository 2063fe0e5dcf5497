"""A trace kept on disk is used only for a model on which nothing that the trace depended on differs."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint
from piecewise_backend.compile import forget_compiled_pieces
from piecewise_backend.config import Options
from piecewise_backend.reasons import FallbackError, ReasonCode
from piecewise_backend.runner.trace import BoundProgram, trace
from tests.piecewise_backend.runner import traced_model
from tests.piecewise_backend.runner.traced_model import SIZE, Changeable, Head, doubled_operator, mean_operator

TOKENS = 6


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces are compiled once for all tests of this module."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def no_programs(cache_dir: Path) -> Iterator[None]:
    """Each test starts without a traced program on disk."""
    yield
    shutil.rmtree(cache_dir / "programs", ignore_errors=True)


class Starts:
    """Starts of one model, as a runner traces it."""

    def __init__(self, cache_dir: Path) -> None:
        self.options = Options(cache_dir=cache_dir)

    def start(self, model: nn.Module, num_tokens: int = TOKENS, rows: int = 2 * TOKENS, **options: Any) -> BoundProgram:
        torch._dynamo.reset()
        self.x, self.positions = torch.randn(rows, SIZE), torch.arange(rows)
        given = replace(self.options, **options)
        return trace(model.eval().requires_grad_(False), (self.x, self.positions), num_tokens, given)

    def check(self, model: nn.Module, source: str, **options: Any) -> BoundProgram:
        """Start, and compare what was started with the model itself."""
        bound = self.start(model, **options)
        assert bound.report.program_source == source, [str(reason) for reason, _ in bound.report.reasons]
        for count in (3, 8):
            with torch.no_grad():
                expected = model(self.x[:count], self.positions[:count])
                torch.testing.assert_close(bound.run(count)[0], expected)
        return bound


@pytest.fixture
def starts(cache_dir: Path) -> Starts:
    return Starts(cache_dir)


@pytest.fixture
def no_dynamo(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it where Dynamo must not be called any more."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Dynamo was called")

    return lambda: monkeypatch.setattr(torch, "compile", refuse)


def test_a_second_start_of_the_same_model_calls_no_dynamo(starts: Starts, no_dynamo: Callable[[], None]) -> None:
    cold = starts.check(Changeable(), "traced")
    no_dynamo()
    for forget in (False, True):
        if forget:
            forget_compiled_pieces()
        warm = starts.check(Changeable(), "disk")
        assert [replace(s, run=None, input_fakes=(), output_fakes=()) for s in warm.program.steps] == [
            replace(s, run=None, input_fakes=(), output_fakes=(), opaque=s.opaque) for s in cold.program.steps
        ]
        assert warm.varying == cold.varying
        assert warm.program.outputs == cold.program.outputs
        assert warm.report.steps == cold.report.steps
        assert warm.report.structures.keys() == cold.report.structures.keys()
    assert set(warm.report.compiled.values()) == {"disk"}


def test_the_report_says_where_the_program_came_from(starts: Starts) -> None:
    assert "traced in" in dict(starts.start(Changeable()).report.summary())["program"]
    assert "read from disk in" in dict(starts.start(Changeable()).report.summary())["program"]


def test_weights_are_those_of_the_model_that_is_started(starts: Starts) -> None:
    starts.check(Changeable(seed=0), "traced")
    starts.check(Changeable(seed=1), "disk")


def test_linear_layers_are_merged_again_on_a_warm_start(starts: Starts) -> None:
    starts.check(Changeable(), "traced")
    model = Changeable()
    starts.check(model, "disk")
    weights = (model.left.weight, model.right.weight)
    assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
    starts.check(model, "disk")


def _set(path: str, value: Any) -> Callable[[nn.Module], None]:
    """Changes an attribute, an item or a list's element of the model."""

    def change(model: nn.Module) -> None:
        *way, last = path.split(".")
        target: Any = model
        for name in way:
            target = target[name] if isinstance(target, dict) else getattr(target, name)
        if isinstance(target, dict):
            target[last] = value
        else:
            setattr(target, last, value)

    return change


def _forward_of_instance(model: Any) -> None:
    model.head.forward = lambda x: x * 5


def _hook(model: Any) -> None:
    model.head.register_forward_hook(lambda module, args, result: result * 3)


def _pre_hook(model: Any) -> None:
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _other_dtype(model: Any) -> None:
    model.head.to(torch.float64)


def _other_closure(model: Any) -> None:
    model.function = traced_model.times(9.0)


def _other_default(model: Any) -> None:
    def function(x: torch.Tensor, factor: float = 11.0) -> torch.Tensor:
        return x * factor

    model.function = function


def _tied(model: Any) -> None:
    model.right.weight = model.left.weight


def _more_layers(model: Any) -> None:
    model.layers.append(Head(4.0))


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "a number": _set("scale", 7.0),
    "a flag": _set("add_positions", False),
    "a value of a dict": _set("settings.shift", 3.0),
    "a value of a config object": _set("config.factor", 5.0),
    "a list of numbers": _set("factors", [2.0, 3.0]),
    "an attribute of a module of torch": _set("norm.eps", 10.0),
    "a submodule": _set("head", nn.Tanh()),
    "a submodule of the same class": _set("head", Head(13.0)),
    "a forward of one instance": _forward_of_instance,
    "a forward hook": _hook,
    "a forward pre-hook": _pre_hook,
    "the dtype of a submodule": _other_dtype,
    "a value in a closure": _other_closure,
    "a default argument": _other_default,
    "a weight that is shared": _tied,
    "a longer module list": _more_layers,
    "a tensor that is no parameter": _set("table", torch.ones(2 * SIZE, SIZE)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_model_that_was_changed_is_traced_again(change: Callable[[nn.Module], None], starts: Starts) -> None:
    starts.check(Changeable(), "traced")
    model = Changeable()
    change(model)
    starts.check(model, "traced")
    starts.check(Changeable(), "disk")  # the first one is still there


GLOBALS: dict[str, tuple[Any, str, Any]] = {
    "a global number": (traced_model, "FACTOR", 17.0),
    "a global function": (traced_model, "activation", torch.tanh),
    "an entry of a global table": (traced_model.TABLE, "mode", "negative"),
    "a function registered under a name": (traced_model.TABLE, "gate", lambda x: x * 19),
    "a method of a class": (Head, "forward", lambda self, x: x * self.factor - 1),
    "a method of a class of torch": (nn.LayerNorm, "forward", lambda self, x: x + 1),
    "a method of a config class": (traced_model.Config, "get", lambda self: self.factor * 23),
    "a constant of a class": (Head, "offset", 29.0),
}


@pytest.mark.parametrize(("where", "name", "value"), GLOBALS.values(), ids=GLOBALS.keys())
def test_a_model_around_which_something_was_changed_is_traced_again(
    where: Any, name: str, value: Any, starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts.check(Changeable(), "traced")
    set_one = monkeypatch.setitem if isinstance(where, dict) else monkeypatch.setattr
    set_one(where, name, value)
    starts.check(Changeable(), "traced")
    monkeypatch.undo()
    starts.check(Changeable(), "disk")


def test_what_is_stale_is_named_in_a_reason(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.check(Changeable(), "traced")
    monkeypatch.setattr(traced_model, "FACTOR", 31.0)
    bound = starts.check(Changeable(), "traced", on_fallback="error")
    (reason,) = [reason for reason, _ in bound.report.reasons if reason.code is ReasonCode.PROGRAM_STALE]
    assert "FACTOR" in reason.detail
    assert "was 2.0, is 31.0" in reason.detail


def test_options_that_decide_the_program_are_part_of_its_key(starts: Starts) -> None:
    starts.check(Changeable(), "traced")
    starts.check(Changeable(), "traced", merge_linears=False)
    starts.check(Changeable(), "traced", splitting_ops=(mean_operator,))
    starts.check(Changeable(), "traced", num_tokens=TOKENS - 1)
    starts.check(Changeable(), "traced", compiler_options={"epilogue_fusion": False})
    starts.check(Changeable(), "disk", mode="NONE", rows=3 * TOKENS)


def test_a_breakpoint_registered_in_another_way_splits_anew(starts: Starts) -> None:
    starts.check(Changeable(), "traced")
    try:
        register_breakpoint(doubled_operator)
        assert starts.check(Changeable(), "traced").report.num_breakpoints == 1
        warm = starts.check(Changeable(), "disk")
        assert [s.breakpoint is not None for s in warm.program.steps] == [False, True, False]
        assert not warm.program.breakpoints[0].breakpoint.capturable
        register_breakpoint(doubled_operator, capturable=True)
        assert starts.check(Changeable(), "traced").program.breakpoints[0].breakpoint.capturable
        assert starts.check(Changeable(), "disk").program.breakpoints[0].breakpoint.capturable
    finally:
        unregister_breakpoint(doubled_operator)


def test_a_piece_of_views_and_an_operator_with_results_are_rebuilt(starts: Starts) -> None:
    options = {"splitting_ops": (mean_operator, doubled_operator)}
    cold = starts.check(Changeable(), "traced", **options)
    warm = starts.check(Changeable(), "disk", **options)
    assert [s.launches for s in warm.program.steps] == [s.launches for s in cold.program.steps]
    assert [s.breakpoint for s in warm.program.steps] == [s.breakpoint for s in cold.program.steps]


def test_sizes_of_a_program_from_disk_are_those_that_were_traced(starts: Starts) -> None:
    cold, warm = starts.check(Changeable(), "traced"), starts.check(Changeable(), "disk")
    for before, now in zip(cold.program.inputs, warm.program.inputs, strict=True):
        assert (now.name, now.is_static, now.is_written, now.storage) == (
            before.name,
            before.is_static,
            before.is_written,
            before.storage,
        )
        if isinstance(before.fake, torch.Tensor):
            for count in (2, 9):
                assert warm.dim.layout(now.fake, count) == cold.dim.layout(before.fake, count)
            assert (now.fake.dtype, now.fake.device) == (before.fake.dtype, before.fake.device)
        else:
            assert type(now.fake) is type(before.fake)


def test_without_the_cache_nothing_is_read_or_written(starts: Starts, cache_dir: Path) -> None:
    starts.check(Changeable(), "traced", cache=False)
    assert not (cache_dir / "programs").exists()
    starts.check(Changeable(), "traced")
    starts.check(Changeable(), "traced", cache=False)


@pytest.mark.parametrize(
    "damage", [lambda b: b[: len(b) // 2], lambda b: b.replace(b'"steps"', b'"stops"'), lambda b: b""]
)
def test_a_damaged_file_is_a_reason_and_a_trace(
    damage: Callable[[bytes], bytes], starts: Starts, cache_dir: Path
) -> None:
    starts.check(Changeable(), "traced")
    (file,) = (cache_dir / "programs").glob("*.json")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    with pytest.raises(FallbackError, match="altered or cut short"):
        starts.start(Changeable(), on_fallback="error")
    file.write_bytes(damage(whole))
    bound = starts.check(Changeable(), "traced")
    assert ReasonCode.ARTIFACT_UNREADABLE in bound.report.reasons.codes()
    starts.check(Changeable(), "disk")


def test_a_program_whose_piece_is_gone_is_traced_again(starts: Starts, cache_dir: Path) -> None:
    cold = starts.check(Changeable(), "traced")
    for key in cold.report.compiled:
        (cache_dir / "pieces" / f"{key}.json").unlink()
    forget_compiled_pieces()
    bound = starts.check(Changeable(), "traced")
    assert ReasonCode.PROGRAM_STALE in bound.report.reasons.codes()
    forget_compiled_pieces()
    starts.check(Changeable(), "disk")


def test_a_model_that_its_own_call_changes_is_not_kept(starts: Starts, cache_dir: Path) -> None:
    model = Changeable()
    model.config = traced_model.CountingConfig()
    bound = starts.check(model, "traced")
    assert ReasonCode.PROGRAM_NOT_KEPT in bound.report.reasons.codes()
    assert not list((cache_dir / "programs").glob("*.json"))


def test_buffers_that_become_views_of_one_storage_are_traced_again(starts: Starts) -> None:
    def model(*, shared: bool) -> Changeable:
        made = Changeable()
        both = torch.ones(2, SIZE, SIZE)
        made.register_buffer("first", both[0] if shared else both[0].clone())
        del made.table
        made.register_buffer("table", both[1] if shared else both[1].clone())
        return made

    starts.check(model(shared=False), "traced")
    starts.check(model(shared=True), "traced")
    starts.check(model(shared=False), "disk")


def test_parameters_merged_before_are_not_kept_as_separate_ones(starts: Starts) -> None:
    model = Changeable()
    starts.check(model, "traced")
    bound = starts.check(model, "traced", merge_linears=False)
    assert ReasonCode.PROGRAM_NOT_KEPT in bound.report.reasons.codes()
    starts.check(Changeable(), "traced", merge_linears=False)
    starts.check(Changeable(), "disk", merge_linears=False)


def test_an_operator_with_another_fake_is_traced_again(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    starts.check(Changeable(), "traced")
    kernel = torch._library.simple_registry.singleton.find("traced_model::doubled").fake_impl.kernel
    monkeypatch.setattr(kernel, "func", lambda x: torch.empty_like(x).contiguous())
    bound = starts.check(Changeable(), "traced")
    assert ReasonCode.PROGRAM_STALE in bound.report.reasons.codes()

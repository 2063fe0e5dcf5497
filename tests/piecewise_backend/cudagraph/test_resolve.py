"""Which mode and sizes come of what the backends support."""

import csv
from pathlib import Path

import pytest
import torch

from attention.base import AttentionCGSupport
from attention.groups import AttentionCGSupportInfo, init_attn_backend
from piecewise_backend.cudagraph.modes import CUDAGraphMode
from piecewise_backend.cudagraph.resolve import resolve_cudagraph_mode_and_sizes, resolve_mode
from tests.tiny import TinyDecoder

CASES = list(csv.DictReader((Path(__file__).parents[2] / "cases" / "resolve_modes.csv").open()))


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(c.values()))
def test_every_row_of_the_resolution_table_comes_out_as_written(case: dict[str, str]) -> None:
    support = AttentionCGSupportInfo(AttentionCGSupport[case["min_support"]], "some backend")
    arguments = (
        CUDAGraphMode[case["requested"]],
        support,
        int(case["decode_query_len"]),
        case["pieces_available"] == "True",
    )
    if case["resolved"] == "ERROR":
        with pytest.raises(ValueError, match="'some backend' can never be recorded"):
            resolve_mode(*arguments)
        return
    mode, reasons = resolve_mode(*arguments)
    assert mode.name == case["resolved"]
    assert bool(reasons) == (case["requested"] != case["resolved"]), "a changed mode has a reason, an unchanged none"


def test_the_table_has_all_eighty_rows() -> None:
    assert len(CASES) == 80


def resolve(mode: str, **settings: object) -> object:
    model = TinyDecoder()
    specs = {
        n: m.get_spec(block_size=16, dtype=torch.float32) for n, m in model.named_modules() if n.endswith("attention")
    }
    groups, support, _ = init_attn_backend(
        specs, max_num_reqs=8, max_num_tokens=64, max_model_len=128, device=torch.device("cpu")
    )
    limits = {"max_num_tokens": 64, "max_num_reqs": 8} | settings
    return resolve_cudagraph_mode_and_sizes(CUDAGraphMode[mode], groups, support, **limits)


def test_full_and_piecewise_records_attention_in_decode_batches_only() -> None:
    resolved = resolve("FULL_AND_PIECEWISE")
    assert len(resolved.decode.recorded_layers) == 3
    assert not resolved.mixed.recorded_layers
    assert resolved.decode.uniform_query_len == 1


def test_descriptors_come_largest_first_and_decode_never_exceeds_the_requests_that_fit() -> None:
    descriptors = resolve("FULL_AND_PIECEWISE", capture_sizes=[1, 4, 64]).descriptors(8)
    sizes = [d.num_tokens for d in descriptors]
    assert sizes == sorted(sizes, reverse=True)
    assert max(d.num_reqs for d in descriptors if d.uniform_query_len) == 8


def test_mode_none_captures_nothing() -> None:
    assert resolve("NONE").descriptors(8) == ()


def test_a_full_mixed_descriptor_fixes_the_padded_number_of_requests() -> None:
    descriptors = resolve("FULL", capture_sizes=[2, 32]).descriptors(8)
    assert {d.num_tokens: d.num_reqs for d in descriptors if d.uniform_query_len is None} == {2: 2, 32: 8}
    assert {d.num_tokens for d in descriptors if d.uniform_query_len == 1} == {2, 8}, "decode has graphs of its own"

"""What metadata says of a padded batch, and what builders are told of capturing."""

from typing import Any

import numpy as np
import pytest
import torch

from attention.backends.pytorch import TorchBackend, TorchMetadataBuilder
from attention.metadata import CommonAttentionMetadata
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.runner.batch import InputBatch
from tests.tiny import TinyDecoder, make_runner, work


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CommonAttentionMetadata, bool]]:
    """Every call of a builder: (facts of the batch, for_capture)."""
    calls: list[tuple[CommonAttentionMetadata, bool]] = []

    class Recording(TorchMetadataBuilder):
        def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> Any:
            calls.append((common, for_capture))
            return super().build(common, for_capture=for_capture)

    monkeypatch.setattr(TorchBackend, "get_builder_cls", staticmethod(lambda: Recording))
    return calls


def test_padded_requests_and_tokens_are_inert(builds: list[tuple[CommonAttentionMetadata, bool]]) -> None:
    """R36: metadata tells the true number of tokens."""
    runner = make_runner("NONE", model=TinyDecoder())
    for buffer in (runner.buffers.seq_lens, runner.buffers.query_start_loc, runner.buffers.block_table):
        buffer.cpu.fill_(77)
    batch = InputBatch.make([work("a", [1, 2, 3, 4], 2, [5]), work("b", [7, 8], 0, [6])])
    descriptor = BatchDescriptor(mode=CUDAGraphMode.FULL, num_tokens=8, num_reqs=4, max_query_len=8)
    runner.state.prepare_inputs(batch, 8)
    runner.state.prepare_attn(batch, descriptor, recorded_layers=frozenset(runner.layers))
    common, for_capture = builds[-1]
    assert not for_capture
    assert (common.num_tokens, common.num_actual_tokens, common.num_reqs, common.max_query_len) == (8, 6, 4, 8)
    assert common.query_start_loc.tolist() == [0, 4, 6, 6, 6]
    assert common.seq_lens.tolist() == [6, 2, 0, 0]
    assert common.slot_mapping.tolist() == [5 * 16 + i for i in (2, 3, 4, 5)] + [6 * 16, 6 * 16 + 1, -1, -1]
    assert common.block_table[2:].eq(0).all()
    assert runner.buffers.input_ids.cpu[:8].tolist() == [1, 2, 3, 4, 7, 8, 0, 0]
    assert runner.buffers.positions.cpu[:8].tolist() == [2, 3, 4, 5, 0, 1, 0, 0]


@pytest.mark.parametrize(("mode", "recorded"), [("FULL", True), ("PIECEWISE", False)])
def test_metadata_is_built_for_capture_exactly_where_attention_is_recorded(
    mode: str, recorded: bool, builds: list[tuple[CommonAttentionMetadata, bool]]
) -> None:
    make_runner(mode, capture_sizes=[8])
    sizes = [8, 8, 6, 6] if recorded else [8, 8]  # the largest decode batch is one of 6 requests
    assert [common.num_tokens for common, _ in builds] == sizes, "fresh for warm-up and for capture"
    assert {for_capture for _, for_capture in builds} == {recorded}
    assert all(common.max_seq_len == 128 and common.slot_mapping.eq(-1).all() for common, _ in builds[:1])


def test_running_is_not_capturing(builds: list[tuple[CommonAttentionMetadata, bool]]) -> None:
    runner = make_runner("FULL", capture_sizes=[8])
    builds.clear()
    runner.execute([work("a", [1, 2, 3], 0, [0])])
    assert [for_capture for _, for_capture in builds] == [False]


def test_addresses_do_not_depend_on_the_batch(builds: list[tuple[CommonAttentionMetadata, bool]]) -> None:
    runner = make_runner("FULL", capture_sizes=[8])
    builds[:] = [(common, capturing) for common, capturing in builds if common.num_tokens == 8]
    runner.execute([work("a", [1, 2, 3], 0, [0])])
    runner.execute([work("b", [9], 3, [4], is_decode=True), work("c", [1, 2, 3, 4], 0, [2])])
    for field in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert len({getattr(common, field).data_ptr() for common, _ in builds}) == 1, field
        assert len({getattr(common, field).shape for common, _ in builds}) == 1, field
    assert isinstance(builds[0][0].seq_lens, torch.Tensor)


@pytest.mark.parametrize(
    "token_ids",
    [[5, 6], (5, 6), range(5, 7), np.array([5, 6], np.uint16), [np.int64(5), np.int32(6)], torch.tensor([5, 6])],
    ids=["list", "tuple", "range", "unsigned array", "numpy ints", "tensor"],
)
def test_token_ids_come_in_any_form_beside_a_request_whose_newest_token_the_device_has(token_ids: Any) -> None:
    state = make_runner("NONE").state
    newest = work("a", [-1], 3, [0], is_decode=True, state_slot=0)
    state.prepare_inputs(InputBatch.make([newest, work("b", token_ids, 0, [1])]), 4)
    assert state.buffers.input_ids.cpu[:4].tolist() == [-1, 5, 6, 0]


@pytest.mark.parametrize(
    ("token_ids", "slot", "message"),
    [
        ([3, -1], -1, r"integers of 0 or more, got \[-1\]"),
        ([-2, 3], 0, r"or -1 for its newest token, got \[-2\]"),
        ([1.5, 2], -1, r"integers of 0 or more, got \[1.5, 2.0\]"),
        (["1"], -1, r"got \['1'\]"),
        ([2**70], -1, "integers of 0 or more, got"),
    ],
)
def test_a_token_id_that_means_nothing_is_refused_by_its_requests_name(token_ids: Any, slot: int, message: str) -> None:
    state = make_runner("NONE").state
    right = work("right", [1, 2], 0, [0], state_slot=3)
    wrong = work("wrong", token_ids, 0, [1], state_slot=slot)
    with pytest.raises(ValueError, match=f"token_ids of request 'wrong' must be .*{message}"):
        state.prepare_inputs(InputBatch.make([right, wrong]), 8)

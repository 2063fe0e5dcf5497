"""Which batches are uniform decode, and what fills a descriptor."""

import numpy as np
import pytest

from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.runner.batch import InputBatch
from tests.tiny import work


def test_equal_lengths_are_uniform_decode_only_past_the_prefill() -> None:
    """R25: a request still in prefill with exactly as many tokens left is a prefill."""
    decodes = [work("a", [1] * 4, 9, [0], is_decode=True), work("b", [2] * 4, 3, [1], is_decode=True)]
    assert InputBatch.make(decodes).uniform_query_len == 4
    assert InputBatch.make([decodes[0], work("b", [2] * 4, 3, [1])]).uniform_query_len is None
    assert InputBatch.make([decodes[0], work("b", [2], 3, [1], is_decode=True)]).uniform_query_len is None


def test_starts_and_lengths_are_those_of_the_requests() -> None:
    batch = InputBatch.make([work("a", [1, 2, 3], 5, [0]), work("b", [4], 0, [1])])
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [8, 1]
    assert (batch.num_reqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len) == (2, 4, 3, 8)


def test_a_token_knows_its_request_and_its_place_there() -> None:
    batch = InputBatch.make([work("a", [1, 2, 3], 5, [0]), work("b", [4], 0, [1]), work("c", [5, 6], 9, [2])])
    assert batch.token_request.tolist() == [0, 0, 0, 1, 2, 2]
    assert batch.positions.tolist() == [5, 6, 7, 0, 9, 10]
    one_each = InputBatch.make([work("a", [1], 5, [0]), work("b", [4], 0, [1])])
    assert (one_each.token_request.tolist(), one_each.positions.tolist()) == ([0, 1], [5, 0])
    assert (one_each.token_request.dtype, one_each.positions.dtype) == (np.int32, np.int64)


def test_logits_are_wanted_of_last_tokens_and_of_drafts_and_the_token_before_them() -> None:
    plain = [work("a", [1, 2, 3], 0, [0]), work("b", [4], 7, [1])]
    assert InputBatch.make(plain).logits_rows.tolist() == [2, 3]
    drafts = work("c", [5, 6, 7], 9, [2], num_draft_tokens=2)
    assert InputBatch.make([*plain, drafts]).logits_rows.tolist() == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "descriptor",
    [
        BatchDescriptor(mode=CUDAGraphMode.PIECEWISE, num_tokens=13),
        BatchDescriptor(mode=CUDAGraphMode.FULL, num_tokens=7, num_reqs=7, uniform_query_len=1, max_query_len=1),
        BatchDescriptor(mode=CUDAGraphMode.FULL, num_tokens=40, num_reqs=6, max_query_len=40),
    ],
    ids=str,
)
def test_a_dummy_batch_fills_its_descriptor_with_sequences_of_the_models_length(descriptor: BatchDescriptor) -> None:
    batch = InputBatch.make_dummy(descriptor, max_num_reqs=6, max_model_len=32)
    assert batch.num_tokens == descriptor.num_tokens
    assert batch.num_reqs == (descriptor.num_reqs or 6)
    assert set(batch.seq_lens.tolist()) == {32}
    assert batch.uniform_query_len == descriptor.uniform_query_len

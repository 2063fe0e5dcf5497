"""The short convolution, served in chunks, against one dense convolution of whole sequences."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from attention.layers import ShortConv
from attention.specs import ShortConvSpec
from tests.attention.oracle import TOLERANCE
from tests.attention.serving import (
    LENGTHS,
    SIZES,
    Batch,
    Chunk,
    Schedule,
    Sizes,
    dtypes,
    implementations,
    poisoned_memory,
    random_schedule,
    same_bytes,
    skip_without_interpreter,
)


def dense_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, silu: bool) -> torch.Tensor:
    """x [n, dim] -> [n, dim] fp64: one sequence, whole."""
    padded = F.pad(x.double().T, (weight.shape[1] - 1, 0))
    out = F.conv1d(padded, weight.double()[:, None], bias if bias is None else bias.double(), groups=x.shape[1]).T
    return F.silu(out) if silu else out


class Conv:
    """A layer, its state, and the sequences it is served with. Unwritten state is NaN."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        *,
        dim: int = 24,
        kernel_size: int = 4,
        num_draft_tokens: int = 0,
        bias: bool = True,
        silu: bool = True,
        lengths: Sequence[int] = LENGTHS,
        device: str = "cpu",
        sizes: Sizes = SIZES,
    ) -> None:
        if name == "kernels" and device == "cpu":
            skip_without_interpreter()
        self.operator = importlib.import_module(f"attention.backends.short_conv.{name}").short_conv
        self.spec = ShortConvSpec(
            dim=dim,
            kernel_size=kernel_size,
            num_draft_tokens=num_draft_tokens,
            block_size=sizes.block_size,
            dtype=dtype,
        )
        self.silu = silu
        self.weight = torch.randn(dim, kernel_size).to(device, dtype)
        self.bias = torch.randn(dim).to(device, dtype) if bias else None
        self.sequences = [torch.randn(length, dim).to(device, dtype) for length in lengths]
        self.batch = Batch(sizes, device=device)
        self.x = torch.empty(sizes.max_num_tokens + 2, dim, dtype=dtype, device=device)
        self.state = torch.full((sizes.num_slots, *self.spec.caches()["conv_state"].shape), float("nan"), device=device)
        self.state = self.state.to(dtype)

    def run(self) -> torch.Tensor:
        x = self.x[: self.batch.num_tokens]
        with poisoned_memory():
            return self.operator(x, self.weight, self.bias, self.state, *self.batch.facts, self.silu)

    def step(self, run: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
        """One batch, as loaded; the state must then differ by its last tokens and nothing else."""
        self.batch.gather(self.sequences, self.x)
        expected = self.state.clone()
        length = expected.shape[1]
        for chunk, first in zip(self.batch.chunks, self.batch.starts, strict=False):
            for index in range(max(0, chunk.length - length), chunk.length):
                if chunk.slot >= 0:
                    expected[chunk.slot, (chunk.start + index) % length] = self.x[first + index]
        out = (run or self.run)()
        assert same_bytes(self.state, expected), "other states changed than the batch's"
        return out

    def serve(self, schedule: Schedule, run: Callable[[], torch.Tensor] | None = None, **padding: int) -> None:
        """Serve every sequence, and compare with the dense convolution of each."""
        results = [torch.full_like(x, float("nan")) for x in self.sequences]
        for chunks in schedule:
            self.batch.load(chunks, **padding)
            self.batch.scatter(self.step(run), results)
        for x, result in zip(self.sequences, results, strict=True):
            self.assert_close(result, dense_conv(x, self.weight, self.bias, self.silu))

    def assert_close(self, result: torch.Tensor, expected: torch.Tensor) -> None:
        tolerance = TOLERANCE[result.dtype]
        torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)


@implementations
@dtypes
@pytest.mark.parametrize(
    "change",
    [{}, {"kernel_size": 2, "bias": False}, {"silu": False, "dim": 130}, {"kernel_size": 7, "num_draft_tokens": 2}],
    ids=str,
)
def test_sequences_served_in_chunks_of_mixed_batches_give_the_dense_result(
    name: str, dtype: torch.dtype, change: dict[str, Any]
) -> None:
    Conv(name, dtype, **change).serve(random_schedule(LENGTHS, SIZES, seed=1))


@implementations
@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_rejected_drafts_leave_no_trace_in_later_results(name: str, num_draft_tokens: int) -> None:
    schedule = random_schedule(LENGTHS, SIZES, seed=2, num_draft_tokens=num_draft_tokens)
    assert any(chunk.right < chunk.length for chunks in schedule for chunk in chunks)
    Conv(name, torch.float32, num_draft_tokens=num_draft_tokens).serve(schedule)


@implementations
def test_all_drafts_rejected_again_and_again_leave_no_trace(name: str) -> None:
    steps = [[Chunk(sequence=0, start=p, length=4, right=1, slot=2)] for p in range(8)]
    Conv(name, torch.float32, num_draft_tokens=3, lengths=[11]).serve(
        [*steps, [Chunk(sequence=0, start=8, length=3, right=3, slot=2)]]
    )


@implementations
def test_a_request_in_a_reused_slot_sees_nothing_of_the_old_one(name: str) -> None:
    old = Chunk(sequence=0, start=0, length=9, right=9, slot=1)
    new = [Chunk(sequence=1, start=start, length=1, right=1, slot=1) for start in range(5)]
    Conv(name, torch.float32, lengths=[9, 5]).serve([[old], *([chunk] for chunk in new)])


@implementations
def test_an_inert_request_reads_and_writes_no_state_and_is_computed_from_its_tokens_alone(name: str) -> None:
    conv = Conv(name, torch.float32)
    inert = Chunk(sequence=0, start=6, length=5, right=5, slot=-1)
    conv.batch.load([inert, Chunk(sequence=3, start=0, length=5, right=5, slot=0)])
    out = conv.step()
    conv.assert_close(out[:5], dense_conv(conv.sequences[0][6:11], conv.weight, conv.bias, conv.silu))
    conv.assert_close(out[5:10], dense_conv(conv.sequences[3], conv.weight, conv.bias, conv.silu))


@implementations
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_a_batch_of_padding_changes_no_state(name: str, num_tokens: int) -> None:
    conv = Conv(name, torch.float32)
    conv.batch.load([], num_tokens=num_tokens)
    assert conv.step().shape == (num_tokens, 24)


@implementations
@dtypes
def test_strided_inputs_and_states_are_read_and_written_in_place(name: str, dtype: torch.dtype) -> None:
    """Inputs are slices of a fused projection; states may share their rows with other layers'."""
    conv = Conv(name, dtype, lengths=LENGTHS[3:])
    tokens, dim = conv.x.shape
    conv.x = torch.full((tokens, 3 * dim), float("nan"), dtype=dtype)[:, dim : 2 * dim]
    wide = torch.full((*conv.state.shape[:2], 2 * dim), float("nan"), dtype=dtype)
    conv.state = wide[:, :, dim:]
    conv.weight = conv.weight.T.contiguous().T
    conv.serve(random_schedule(LENGTHS[3:], SIZES, seed=3))
    assert wide[:, :, :dim].isnan().all()


@implementations
def test_the_result_is_a_new_contiguous_tensor_of_the_inputs_dtype(name: str) -> None:
    conv = Conv(name, torch.float16)
    conv.x = torch.empty(conv.x.shape[1], conv.x.shape[0] + 1, 2).half()[:, :-1, 0].T.contiguous()
    conv.batch.load([Chunk(sequence=0, start=0, length=3, right=3, slot=0)])
    out = conv.step()
    assert (out.dtype, out.is_contiguous(), out.shape) == (torch.float16, True, (5, 24))
    assert out.data_ptr() != conv.x.data_ptr()


@torch.no_grad()
def test_a_layer_gives_the_dense_result_through_its_operator() -> None:
    conv = Conv("reference", torch.float32)
    layer = ShortConv(24, 4, bias=True, silu=True)
    layer.load_state_dict({"weight": conv.weight, "bias": conv.bias})
    layer.bind("layer", {"conv_state": conv.state, **conv.batch.tensors})
    conv.serve(random_schedule(LENGTHS, SIZES, seed=5), lambda: layer(conv.x[: conv.batch.num_tokens]))


def test_the_kernel_says_which_tensor_has_a_strided_last_dimension() -> None:
    conv = Conv("kernels", torch.float32)
    conv.batch.load([])
    conv.x = conv.x.T.contiguous().T
    with pytest.raises(ValueError, match=r"contiguous last dimensions.*x \(1, "):
        conv.run()

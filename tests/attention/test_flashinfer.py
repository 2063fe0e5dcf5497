"""What of the FlashInfer backend needs neither FlashInfer nor a GPU that it runs on."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import FlashInferBackend
from attention.backends.flashinfer import backend as backend_module
from attention.backends.flashinfer import wrappers as wrappers_module
from attention.backends.flashinfer.kernels import fill_page_table, gather_page_indices
from attention.backends.flashinfer.workspace import plan_bytes, split_bytes
from attention.registry import available_backends, choose_backend, get_backend
from attention.specs import AttentionSpec
from piecewise_backend.cudagraph.fingerprint import Fingerprint
from tests.attention.oracle import TOLERANCE, Case, PagedBatch, dense_attention, random_requests

CUDA = torch.device("cuda")
# Triton's interpreter is on exactly where there is no GPU.
KERNEL_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = AttentionSpec(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=torch.bfloat16, scale=0.1)


@pytest.fixture
def capable_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, as far as PyTorch tells."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backend_module, "unsupported_device", lambda device: None)
    monkeypatch.setattr(backend_module, "library", lambda: None)


def test_importing_the_backend_does_not_import_the_library() -> None:
    code = "import sys, attention.backends.flashinfer; assert 'flashinfer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_is_registered_and_not_preferred() -> None:
    assert "flashinfer" in available_backends()
    assert get_backend("flashinfer") is FlashInferBackend
    assert choose_backend(dataclasses.replace(SPEC, dtype=torch.float32), torch.device("cpu")).backend.name == "torch"


def test_the_cpu_is_refused() -> None:
    assert FlashInferBackend.unsupported_reason(SPEC, torch.device("cpu")) == (
        "its kernels run on CUDA devices, not on 'cpu'"
    )
    with pytest.raises(ValueError, match="'flashinfer' cannot run this model: its kernels run on CUDA devices"):
        choose_backend(SPEC, torch.device("cpu"), forced="flashinfer")


@pytest.mark.usefixtures("capable_machine")
@pytest.mark.parametrize(
    "change",
    [{}, {"head_size": 64}, {"head_size": 256, "dtype": torch.float16}, {"sliding_window": 1, "soft_cap": 30.0}],
    ids=str,
)
def test_what_the_library_runs_is_accepted(change: dict[str, Any]) -> None:
    assert FlashInferBackend.unsupported_reason(dataclasses.replace(SPEC, **change), CUDA) is None


@pytest.mark.usefixtures("capable_machine")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "dtype torch.float32 is not one of ['torch.float16', 'torch.bfloat16']"),
        ({"head_size": 80}, "head_size must be one of [64, 128, 256], got 80"),
        ({"soft_cap": 0.0}, "soft_cap must be positive, got 0.0"),
    ],
)
def test_what_the_library_does_not_run_is_refused(change: dict[str, Any], reason: str) -> None:
    assert FlashInferBackend.unsupported_reason(dataclasses.replace(SPEC, **change), CUDA) == reason


@pytest.mark.usefixtures("capable_machine")
def test_a_machine_without_the_library_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("No module named 'flashinfer'")

    monkeypatch.setattr(backend_module, "library", missing)
    reason = FlashInferBackend.unsupported_reason(SPEC, CUDA)
    assert reason == ("the library is not importable here: No module named 'flashinfer'; pip install flashinfer-python")


@pytest.mark.usefixtures("capable_machine")
def test_a_machine_without_a_fit_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert FlashInferBackend.unsupported_reason(SPEC, CUDA) == "its kernels need compute capability 8.0, got 7.5"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FlashInferBackend.unsupported_reason(SPEC, CUDA) == "PyTorch finds no CUDA device here"


LENGTHS = {
    "one": [33],
    "edges": [1, 15, 16, 17, 32, 33],
    "padded": [40, 1, 0, 0],
    "empty in the midst": [5, 0, 64, 0, 16],
    "more requests than a program counts at a time": [(7 * r) % 50 for r in range(1100)],
}


@pytest.mark.parametrize("seq_lens", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("block_size", [16, 32])
def test_page_indices_are_those_of_a_loop(seq_lens: list[int], block_size: int) -> None:
    blocks_per_request = 6
    table = torch.full((len(seq_lens), blocks_per_request), 1 << 30, dtype=torch.int32)
    expected: list[int] = []
    indptr, last = [0], []
    for request, seq_len in enumerate(seq_lens):
        pages = max(1, -(-seq_len // block_size))
        if seq_len:
            table[request, :pages] = torch.randint(1, 1000, (pages,), dtype=torch.int32)
            expected += table[request, :pages].tolist()
        else:
            expected.append(0)
        indptr.append(len(expected))
        last.append(max(1, seq_len) - (pages - 1) * block_size)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)

    found = torch.full((len(expected) + 9,), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(lengths.to(KERNEL_DEVICE), table.to(KERNEL_DEVICE), block_size, found)
    assert found.tolist() == expected + [-7] * 9

    page_indptr, last_page_len = torch.empty(len(seq_lens) + 1, dtype=torch.int32), torch.empty_like(lengths)
    fill_page_table(lengths, block_size, page_indptr, last_page_len)
    assert page_indptr.tolist() == indptr
    assert last_page_len.tolist() == last
    assert min(last) >= 1
    assert max(last) <= block_size


def test_page_indices_beyond_what_a_program_takes_at_a_time() -> None:
    table = torch.randint(0, 10_000, (2, 1500), dtype=torch.int32)
    seq_lens = torch.tensor([1400 * 16 - 3, 1], dtype=torch.int32)
    found = torch.full((1403,), -7, dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(seq_lens.to(KERNEL_DEVICE), table.to(KERNEL_DEVICE), 16, found)
    assert found.tolist() == [*table[0, :1400].tolist(), int(table[1, 0]), -7, -7]


def test_a_padded_table_is_read_by_its_rows() -> None:
    wide = torch.arange(40, dtype=torch.int32).view(4, 10)
    found = torch.empty(8, dtype=torch.int32, device=KERNEL_DEVICE)
    seq_lens = torch.tensor([20, 40, 1, 30], dtype=torch.int32, device=KERNEL_DEVICE)
    gather_page_indices(seq_lens, wide.to(KERNEL_DEVICE)[:, :3], 16, found)
    assert found.tolist() == [0, 1, 10, 11, 12, 20, 30, 31]


def test_the_workspace_covers_what_the_planner_takes() -> None:
    """By hand, for 132 multiprocessors: 33 tiles of 128 rows for each of 8 KV heads, fp32, of 32 heads."""
    per_row = 32 * (128 + 1) * 4
    assert split_bytes(SPEC, num_sms=132) == 33 * 128 * per_row + 64
    decode = split_bytes(SPEC, num_sms=132, num_reqs=16, num_rows=16)
    assert decode == 33 * 16 * per_row + 64, "4 query heads a KV head are a tile of 16"
    mixed = split_bytes(SPEC, num_sms=132, num_reqs=256, num_rows=512)
    assert mixed == (512 * 4 // 128 + 256) * 128 * per_row + 64
    assert plan_bytes(SPEC, num_sms=132, num_reqs=256, num_rows=512) < 1 << 20


# The library's wrappers as their documentation has them, computed densely on the CPU.


class PagedDouble:
    """What both wrappers have in common: index arrays in buffers of their own, or the caller's for graphs."""

    max_rows: int | None = None

    def __init__(self, workspace: torch.Tensor, use_cuda_graph: bool, *buffers: torch.Tensor | None) -> None:
        assert workspace.dtype == torch.uint8
        self.workspace, self.for_graphs, self.buffers = workspace, use_cuda_graph, list(buffers)

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer is self.workspace
        assert int_workspace_buffer.dtype == torch.uint8

    def keep(self, starts: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        assert all(array.dtype == torch.int32 for array in (starts, indptr, indices, last))
        assert len(starts) == len(indptr) == len(last) + 1
        assert len(indices) == indptr[-1]
        assert (last >= 1).all()
        assert (last <= self.page_size).all()
        arrays = [starts, indptr, indices, last]
        if not self.for_graphs:
            # Copies, but for what lies on the device already.
            self.buffers = [a if a is indices else a.clone() for a in arrays]
            return
        for buffer, array in zip(self.buffers, arrays, strict=True):
            assert buffer is not None
            assert array is indices or len(buffer) == len(array), "the number of requests is fixed"
            buffer[: len(array)].copy_(array)

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, out: torch.Tensor) -> None:
        assert q.shape == out.shape
        assert len(q) == self.num_rows
        assert out.is_contiguous()
        assert paged_kv_cache.shape[2] == self.page_size
        self.inputs = q, paged_kv_cache, out
        self.replay()

    def replay(self) -> None:
        """The recorded launch: the tensors that it was recorded with, the index arrays as they are now."""
        q, kv_cache, out = self.inputs
        starts, indptr, indices, last = self.buffers
        for request in range(len(last)):
            rows = slice(int(starts[request]), int(starts[request + 1]))
            pages = indices[indptr[request] : indptr[request + 1]].long()
            if rows.start == rows.stop:
                continue
            seq_len = (len(pages) - 1) * self.page_size + int(last[request])
            key, value = kv_cache[pages].transpose(0, 1).flatten(1, 2)[:, :seq_len].unbind(0)
            window = None if self.window_left < 0 else self.window_left + 1
            cap = self.logits_soft_cap or None
            dense = dense_attention(q[rows], key, value, scale=self.sm_scale, sliding_window=window, soft_cap=cap)
            out[rows] = dense.to(out.dtype)

    def keep_variant(
        self,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert q_data_type == kv_data_type == torch.bfloat16
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim in (64, 128)
        self.page_size, self.window_left, self.sm_scale = page_size, window_left, sm_scale
        self.logits_soft_cap = logits_soft_cap


class DecodeDouble(PagedDouble):
    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        starts = None
        if paged_kv_last_page_len_buffer is not None:
            starts = torch.arange(len(paged_kv_last_page_len_buffer) + 1, dtype=torch.int32)
        super().__init__(
            workspace,
            use_cuda_graph,
            starts,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
        )
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        self.keep_variant(*args, **kwargs)
        self.num_rows = len(last_page_len)
        assert self.use_tensor_cores == (args[0] // args[1] >= 4)
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len)


class PrefillDouble(PagedDouble):
    def __init__(
        self,
        workspace: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert (kv_layout, backend) == ("NHD", "fa2")
        super().__init__(
            workspace,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *args: Any,
        causal: bool,
        max_token_per_sequence: int,
        **kwargs: Any,
    ) -> None:
        self.keep_variant(*args, **kwargs)
        self.num_rows = int(qo_indptr[-1])
        assert causal
        assert (qo_indptr.diff() <= max_token_per_sequence).all()
        if self.for_graphs:
            self.max_rows = self.max_rows or self.num_rows
            assert self.num_rows <= self.max_rows, "more rows than the first plan had"
        self.keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder's calls on the CPU: no pinned memory, no streams, and the library's doubles."""
    if torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off, so the kernel does not take tensors on the CPU")
    library = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeDouble, BatchPrefillWithPagedKVCacheWrapper=PrefillDouble
    )
    event = SimpleNamespace(synchronize=lambda: None, record=lambda stream: None)
    zeros = torch.zeros
    monkeypatch.setattr(wrappers_module, "library", lambda: library)
    monkeypatch.setattr(backend_module, "shared_workspace", lambda device, size: zeros(1, dtype=torch.uint8))
    monkeypatch.setattr(torch, "zeros", lambda *shape, pin_memory=False, **kwargs: zeros(*shape, **kwargs))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))


def make_for(batch: PagedBatch) -> tuple[Any, Any]:
    builder = FlashInferBackend.get_builder_cls()(
        batch.spec,
        max_num_reqs=batch.num_reqs,
        max_num_tokens=batch.num_tokens,
        max_model_len=batch.max_model_len,
        device=torch.device("cpu"),
    )
    return builder, FlashInferBackend.get_impl_cls()(batch.spec)


def assert_true_rows_are_right(batch: PagedBatch) -> None:
    true, tolerance = len(batch.expected), TOLERANCE[batch.spec.dtype]
    torch.testing.assert_close(batch.out[:true].double(), batch.expected, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize("for_capture", [False, True], ids=["plain", "for capture"])
@pytest.mark.parametrize(
    "case",
    [
        Case((8, 2), 64, 16, torch.bfloat16, "prefill"),
        Case((4, 4), 128, 32, torch.bfloat16, "chunked", 70, 3.0),
        Case((8, 2), 64, 16, torch.bfloat16, "speculative", 3),
        Case((4, 1), 64, 16, torch.bfloat16, "mixed", 1),
        Case((8, 2), 64, 16, torch.bfloat16, "decode"),
        Case((9, 3), 64, 16, torch.bfloat16, "decode", 33, 3.0),
    ],
    ids=str,
)
def test_the_library_is_asked_for_what_the_oracle_computes(case: Case, for_capture: bool) -> None:
    batch = PagedBatch(
        case.spec,
        num_tokens=sum(query_len for query_len, _ in case.lengths) + 5,
        num_reqs=len(case.lengths) + 2,
        max_model_len=256,
    )
    batch.fill(case.lengths)
    builder, impl = make_for(batch)
    for _ in range(2):
        metadata = builder.build(batch.common(), for_capture=for_capture)
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out)
        assert_true_rows_are_right(batch)


@pytest.mark.usefixtures("doubles")
@pytest.mark.parametrize(
    ("num_tokens", "num_reqs", "max_query_len"),
    [(6, 6, 1), (24, 6, 4), (40, 5, 40)],
    ids=["decode", "speculative", "mixed"],
)
def test_what_was_recorded_for_one_batch_is_right_for_others(
    num_tokens: int, num_reqs: int, max_query_len: int
) -> None:
    spec = Case((8, 2), 64, 16, torch.bfloat16, "decode", 50).spec
    batch = PagedBatch(spec, num_tokens=num_tokens, num_reqs=num_reqs, max_model_len=128)
    batch.fill([(num_tokens // num_reqs, 128)] * num_reqs)
    builder, impl = make_for(batch)
    bounds = {"max_query_len": max_query_len, "max_seq_len": 128}
    recorded = builder.build(batch.common(**bounds), for_capture=True)
    impl.forward(batch.query, batch.kv_cache, recorded, batch.out)
    fingerprint = Fingerprint.take(recorded, layer="a", backend="flashinfer", unrecorded=builder.unrecorded_fields)
    rng = random.Random(0)
    for _ in range(5):
        batch.fill(
            random_requests(
                rng, num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=max_query_len, max_model_len=128
            )
        )
        fingerprint.check(builder.build(batch.common(**bounds), for_capture=False))
        recorded.wrapper._library.replay()
        assert_true_rows_are_right(batch)


@pytest.mark.usefixtures("doubles")
def test_a_result_that_is_not_contiguous_is_refused() -> None:
    batch = PagedBatch(SPEC, num_tokens=4, num_reqs=2, max_model_len=32)
    batch.fill([(2, 2), (2, 20)])
    builder, impl = make_for(batch)
    metadata = builder.build(batch.common(), for_capture=False)
    with pytest.raises(ValueError, match="a contiguous result"):
        impl.forward(batch.query, batch.kv_cache, metadata, batch.out.transpose(0, 1).contiguous().transpose(0, 1))

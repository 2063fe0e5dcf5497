"""FlashInfer's wrappers as its documentation has them, computed densely on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention.backends.flashinfer import backend as backend_module
from attention.backends.flashinfer import wrappers as wrappers_module
from tests.attention.oracle import dense_attention


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


def use_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
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

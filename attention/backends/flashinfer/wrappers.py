"""FlashInfer's wrappers, each with what it takes to plan it anew while the device still reads the last plan."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from attention.backends.flashinfer.kernels import fill_page_table
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

_SERVED_BY_TENSOR_CORES = 4
"""Query heads a KV head from which decode runs on tensor cores, which take a KV head's query heads as rows of one tile.
Below, all that remains (1, 2, 3) are group sizes for which the other decode kernel is instantiated."""


@functools.cache
def library() -> Any:
    """The flashinfer package. ImportError where it is missing."""
    import flashinfer

    return flashinfer


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexBuffers:
    """What kernels find their pages through: one set for all wrappers of a builder, of which a step uses one.

    int32 on the device: query_start_loc, page_indptr [max_num_reqs + 1], last_page_len [max_num_reqs], page_indices
    [max_num_reqs * blocks of the longest request].
    """

    query_start_loc: torch.Tensor
    page_indptr: torch.Tensor
    last_page_len: torch.Tensor
    page_indices: torch.Tensor

    @classmethod
    def allocate(cls, *, max_num_reqs: int, blocks_per_request: int, device: torch.device) -> IndexBuffers:
        """Zeroed buffers for batches of up to `max_num_reqs` requests."""

        def zeros(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        return cls(
            query_start_loc=zeros(max_num_reqs + 1),
            page_indptr=zeros(max_num_reqs + 1),
            last_page_len=zeros(max_num_reqs),
            page_indices=zeros(max_num_reqs * blocks_per_request),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Padded sizes of the batches that one recording serves, and bytes of the plans made for it."""

    num_reqs: int
    num_tokens: int
    plan_bytes: int


class PlanArrays(NamedTuple):
    """A batch's index arrays as `plan` takes them: int32, all but `pages` in pinned memory."""

    starts: torch.Tensor
    """[num_reqs + 1]: first query token of each request, and the end."""
    page_indptr: torch.Tensor
    """[num_reqs + 1]: first page of each request, and the end."""
    pages: torch.Tensor
    """Pages of all requests, on the device."""
    last_page_len: torch.Tensor
    """[num_reqs]: tokens of the last page."""


class Wrapper(ABC):
    """One of the library's wrappers, plain or for recordings (`sizes`), and pinned memory to plan it from.

    `plan` sends its results, and the batch's index arrays, from pinned memory without waiting. They are written for the
    next plan only when that copy is done.
    """

    def __init__(
        self, spec: AttentionSpec, buffers: IndexBuffers, workspace: torch.Tensor, sizes: GraphSizes | None = None
    ) -> None:
        self.spec = spec
        self.sizes = sizes
        self.device = workspace.device
        self.num_rows = 0
        """Rows of the query and of the result that the current plan covers."""
        capacity = buffers.last_page_len.shape[0] if sizes is None else sizes.num_reqs
        self._staging = torch.zeros(3, capacity + 1, dtype=torch.int32, pin_memory=True)
        self._sent = torch.cuda.Event()
        self._library = self._make(buffers, workspace, None if sizes is None else sizes.num_reqs)
        if sizes is not None:
            # The library's own 8 MiB on the device and as much on the host would be spent once a recorded size.
            plan = torch.zeros(sizes.plan_bytes, dtype=torch.uint8, device=self.device)
            self._library.reset_workspace_buffer(workspace, plan)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.sizes or 'plain'})"

    def plan(self, common: CommonAttentionMetadata, page_indices: torch.Tensor) -> None:
        """Prepare `run` for a batch, or the replay of a `run` that was recorded. Its page indices are there already."""
        self._plan(common.query_start_loc_cpu, common.seq_lens_cpu, common.max_query_len, page_indices)

    def run(self, query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor) -> None:
        """See `AttentionImpl.forward`; all contiguous but for the query's first two dimensions."""
        self._library.run(query[: self.num_rows], kv_cache, out=out[: self.num_rows])

    def _plan(
        self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, page_indices: torch.Tensor
    ) -> None:
        self._sent.synchronize()
        num_reqs = seq_lens.shape[0]
        starts, page_indptr = self._staging[0, : num_reqs + 1], self._staging[1, : num_reqs + 1]
        last_page_len = self._staging[2, :num_reqs]
        starts.copy_(query_start_loc)
        fill_page_table(seq_lens, self.spec.block_size, page_indptr, last_page_len)
        pages = page_indices[: int(page_indptr[-1])]
        self._plan_library(PlanArrays(starts, page_indptr, pages, last_page_len), max_query_len)
        self._sent.record(torch.cuda.current_stream(self.device))

    def _shape(self) -> tuple[int, int, int, int]:
        """What decode and prefill are told alike, by position."""
        spec = self.spec
        return spec.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size

    def _variant(self) -> dict[str, Any]:
        """What decode and prefill are told alike: which kernel, and the numbers it takes."""
        spec = self.spec
        return {
            # The library's window does not count the query itself.
            "window_left": -1 if spec.sliding_window is None else spec.sliding_window - 1,
            "logits_soft_cap": spec.soft_cap or 0.0,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.dtype,
        }

    @abstractmethod
    def _make(self, buffers: IndexBuffers, workspace: torch.Tensor, num_reqs: int | None) -> Any:
        """The library's wrapper; for recordings of `num_reqs` requests, if given."""

    @abstractmethod
    def _plan_library(self, arrays: PlanArrays, max_query_len: int) -> None:
        """Plan the library's wrapper, and set `num_rows`."""


class DecodeWrapper(Wrapper):
    """One query token a request. The library gives padded requests a row too: row r is request r."""

    def plan(self, common: CommonAttentionMetadata, page_indices: torch.Tensor) -> None:
        """See `Wrapper.plan`."""
        true = common.num_actual_tokens
        assert int(common.query_start_loc_cpu[true]) == true, "padded requests must come after the true ones"
        super().plan(common, page_indices)

    def _make(self, buffers: IndexBuffers, workspace: torch.Tensor, num_reqs: int | None) -> Any:
        group = self.spec.num_heads // self.spec.num_kv_heads
        settings: dict[str, Any] = {"use_tensor_cores": group >= _SERVED_BY_TENSOR_CORES, "backend": "fa2"}
        if num_reqs is not None:
            settings |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers.page_indptr[: num_reqs + 1],
                "paged_kv_indices_buffer": buffers.page_indices,
                "paged_kv_last_page_len_buffer": buffers.last_page_len[:num_reqs],
            }
        return library().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **settings)

    def _plan_library(self, arrays: PlanArrays, max_query_len: int) -> None:
        self.num_rows = arrays.last_page_len.shape[0]
        pages = (arrays.page_indptr, arrays.pages, arrays.last_page_len)
        self._library.plan(*pages, *self._shape(), **self._variant())


class PrefillWrapper(Wrapper):
    """Any query lengths, zero included. Covers the true tokens and no others."""

    def __init__(
        self, spec: AttentionSpec, buffers: IndexBuffers, workspace: torch.Tensor, sizes: GraphSizes | None = None
    ) -> None:
        super().__init__(spec, buffers, workspace, sizes)
        if sizes is not None:
            # The first plan of a wrapper for recordings says how many rows, and so which tile and how many blocks, all
            # later ones have at most. The batch being recorded may have fewer than its padded size.
            starts = torch.zeros(sizes.num_reqs + 1, dtype=torch.int32)
            starts[-1] = sizes.num_tokens
            self._plan(starts, torch.ones_like(starts[1:]), sizes.num_tokens, buffers.page_indices)

    def _make(self, buffers: IndexBuffers, workspace: torch.Tensor, num_reqs: int | None) -> Any:
        # Of the library's implementations, the one that can be recorded for any mix of lengths.
        settings: dict[str, Any] = {"backend": "fa2"}
        if num_reqs is not None:
            settings |= {
                "use_cuda_graph": True,
                "qo_indptr_buf": buffers.query_start_loc[: num_reqs + 1],
                "paged_kv_indptr_buf": buffers.page_indptr[: num_reqs + 1],
                "paged_kv_indices_buf": buffers.page_indices,
                "paged_kv_last_page_len_buf": buffers.last_page_len[:num_reqs],
            }
        return library().BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **settings)

    def _plan_library(self, arrays: PlanArrays, max_query_len: int) -> None:
        self.num_rows = int(arrays.starts[-1])
        self._library.plan(
            *arrays,
            *self._shape(),
            causal=True,
            # Else the library looks for it in a Python loop over the requests.
            max_token_per_sequence=max_query_len,
            **self._variant(),
        )

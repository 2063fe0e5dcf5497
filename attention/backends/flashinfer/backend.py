"""What the FlashInfer backend supports, and which of its wrappers serves a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch

from attention.backends.devices import unsupported_device
from attention.backends.flashinfer.kernels import gather_page_indices
from attention.backends.flashinfer.workspace import plan_bytes, shared_workspace, split_bytes
from attention.backends.flashinfer.wrappers import (
    DecodeWrapper,
    GraphSizes,
    IndexBuffers,
    PrefillWrapper,
    Wrapper,
    library,
)
from attention.backends.limits import BuilderLimits
from attention.base import AttentionBackend, AttentionCGSupport, AttentionImpl, MetadataBuilder, UncapturableMetadata
from attention.metadata import CommonAttentionMetadata
from attention.specs import AttentionSpec

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_SIZES = (64, 128, 256)
"""Those that the library dispatches to, less 512, which its prefill has too few registers for."""
_MAX_WORKSPACE_BYTES = 2 << 30
"""A recording that would take more is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferMetadata:
    """The wrapper that was planned for the batch: the same object at every replay as at the recording.

    Valid until the builder's next `build`.
    """

    wrapper: Wrapper


class FlashInferMetadataBuilder(MetadataBuilder[FlashInferMetadata]):
    """Plans one wrapper a step: a plain one, or the one that a recording of the batch's padded sizes runs.

    Any mix of query lengths can be recorded. Made for graphs, both wrappers fix grid, tile and the places of all arrays
    by padded sizes alone, and leave the rest to arrays on the device that `plan` writes anew before a replay: which
    request, query tile and part of the sequence a block takes, how long the parts are, and which blocks have nothing to
    do. Requests without tokens get no tile. What `plan` writes comes from the host, so lengths cannot be advanced on
    the device.
    """

    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, spec: AttentionSpec, **limits: Unpack[BuilderLimits]) -> None:
        super().__init__(spec, **limits)
        self.num_sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.buffers = IndexBuffers.allocate(
            max_num_reqs=self.max_num_reqs,
            blocks_per_request=-(-self.max_model_len // spec.block_size),
            device=self.device,
        )
        self._plain: dict[bool, Wrapper] = {}
        self._recorded: dict[tuple[bool, int, int], Wrapper] = {}

    def build(self, common: CommonAttentionMetadata, *, for_capture: bool) -> FlashInferMetadata:
        """Metadata of one batch; `UncapturableMetadata` where recording it would take too large a workspace.

        A batch between graphs that happens to have a recording's sizes is served by its wrapper, which is right for any
        batch of these sizes.
        """
        # The bound is the descriptor's own at the recording and at replay, so both come to the same wrapper.
        is_decode = common.max_query_len == 1 and common.num_reqs <= common.num_tokens
        key = (is_decode, common.num_reqs, common.num_tokens)
        if for_capture and key not in self._recorded:
            self._recorded[key] = self._make_for_graphs(*key)
        wrapper = self._recorded.get(key) or self._plain_wrapper(is_decode)
        # Before the plan: its copies keep the attention kernels, which may start early, away from this kernel.
        gather_page_indices(common.seq_lens, common.block_table, self.spec.block_size, self.buffers.page_indices)
        wrapper.plan(common, self.buffers.page_indices)
        return FlashInferMetadata(wrapper=wrapper)

    def _plain_wrapper(self, is_decode: bool) -> Wrapper:
        if is_decode not in self._plain:
            workspace = shared_workspace(self.device, split_bytes(self.spec, num_sms=self.num_sms))
            kind = DecodeWrapper if is_decode else PrefillWrapper
            self._plain[is_decode] = kind(self.spec, self.buffers, workspace)
        return self._plain[is_decode]

    def _make_for_graphs(self, is_decode: bool, num_reqs: int, num_tokens: int) -> Wrapper:
        num_rows = num_reqs if is_decode else num_tokens
        needed = split_bytes(self.spec, num_sms=self.num_sms, num_reqs=num_reqs, num_rows=num_rows)
        if needed > _MAX_WORKSPACE_BYTES:
            raise UncapturableMetadata(
                f"FlashInfer would take a workspace of {needed >> 20} MiB for {num_tokens} tokens of {num_reqs} "
                f"requests, more than {_MAX_WORKSPACE_BYTES >> 20} MiB: capture smaller sizes"
            )
        sizes = GraphSizes(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            plan_bytes=plan_bytes(self.spec, num_sms=self.num_sms, num_reqs=num_reqs, num_rows=num_rows),
        )
        kind = DecodeWrapper if is_decode else PrefillWrapper
        return kind(self.spec, self.buffers, shared_workspace(self.device, needed), sizes)


class FlashInferImpl(AttentionImpl[FlashInferMetadata]):
    """One run of the planned wrapper, which may merge parts of long sequences in a second kernel."""

    def forward(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: FlashInferMetadata, out: torch.Tensor
    ) -> None:
        """See `AttentionImpl.forward`. `out` is contiguous, the last dimension of the others too.

        Where every request has one token at most, rows of padded requests are written as well.
        """
        if query.stride(2) != 1 or kv_cache.stride(4) != 1 or not out.is_contiguous():
            raise ValueError(
                "flashinfer attention needs contiguous head dimensions and a contiguous result (call .contiguous()), "
                f"got strides query {query.stride()}, kv_cache {kv_cache.stride()}, out {out.stride()}"
            )
        metadata.wrapper.run(query, kv_cache, out)


class FlashInferBackend(AttentionBackend):
    """Paged attention by FlashInfer (https://github.com/flashinfer-ai/flashinfer), compiled on first use."""

    name = "flashinfer"

    @classmethod
    def unsupported_reason(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """See `AttentionBackend.unsupported_reason`."""
        if device.type != "cuda":
            return f"its kernels run on CUDA devices, not on {device.type!r}"
        if spec.dtype not in _DTYPES:
            return f"dtype {spec.dtype} is not one of {[str(dtype) for dtype in _DTYPES]}"
        if spec.head_size not in _HEAD_SIZES:
            return f"head_size must be one of {list(_HEAD_SIZES)}, got {spec.head_size}"
        return _missing_on(device) or unsupported_device(device)

    @staticmethod
    def get_builder_cls() -> type[FlashInferMetadataBuilder]:
        """The builder's class."""
        return FlashInferMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[FlashInferImpl]:
        """The computation's class."""
        return FlashInferImpl


def _missing_on(device: torch.device) -> str | None:
    """What `device`, or this machine, lacks; None for nothing."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "PyTorch finds no CUDA device here"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return f"its kernels need compute capability 8.0, got {capability[0]}.{capability[1]}"
    try:
        library()
    except ImportError as error:
        return f"the library is not importable here: {error}; pip install flashinfer-python"
    return None

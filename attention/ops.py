"""The operators as a compiled graph sees them: schema, fake, and dispatch.

Breakpoints (`attention`, `compressed_attention`, `linear_attention`) name their layer, and find its computation and
this step's metadata in the forward context. The others belong into pieces: they take everything as tensors, the
runner's persistent buffers among them, so identical layers stay identical code.

Registered through `torch.library.Library`, whose call costs a fraction of `torch.library.custom_op`'s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from attention.forward_context import get_forward_context

PAD_SLOT = -1
"""Slot of a padded token: nothing is written for it."""

_REQUESTS = "Tensor token_request, Tensor query_start_loc, Tensor seq_lens, Tensor state_slots"
_library = torch.library.Library("mrv2", "DEF")
_library.define("attention(Tensor query, Tensor kv_cache, Tensor(a!) out, str layer) -> ()")
_library.define(
    "compressed_attention(Tensor query, Tensor local_cache, Tensor compressed_cache, Tensor(a!) out, str layer) -> ()"
)
_library.define(
    "linear_attention(Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, "
    "Tensor(a!) recurrent_state, Tensor(b!) out, str layer) -> ()"
)
_library.define("write_kv_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping) -> ()")
_library.define("write_cache(Tensor value, Tensor(a!) cache, Tensor slot_mapping) -> ()")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    f"short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, {_REQUESTS}, bool silu) -> Tensor"
)
_library.define(
    "compress_kv(Tensor kv, Tensor score, Tensor weight, Tensor(a!) window_state, Tensor(b!) compressed_cache, "
    f"Tensor block_table, {_REQUESTS}, int ratio, float eps) -> ()"
)


def _attention(query: torch.Tensor, kv_cache: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    context = get_forward_context()
    context.impls[layer].forward(query, kv_cache, context.metadata[layer], out)


def _compressed_attention(
    query: torch.Tensor, local_cache: torch.Tensor, compressed_cache: torch.Tensor, out: torch.Tensor, layer: str
) -> None:
    context = get_forward_context()
    context.impls[layer].forward(query, local_cache, compressed_cache, context.metadata[layer], out)


def _linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    out: torch.Tensor,
    layer: str,
) -> None:
    context = get_forward_context()
    context.impls[layer].forward(query, key, value, log_decay, beta, recurrent_state, context.metadata[layer], out)


_BREAKPOINTS = ("mrv2::attention", "mrv2::compressed_attention", "mrv2::linear_attention")


def bind(name: str, tensors: Sequence[torch.Tensor], layer: str) -> Callable[[], None] | None:
    """One of the breakpoint operators on tensors that will always be these, `out` last: a call without arguments that
    looks up this step's metadata and nothing else. Within a forward context; None for an operator that is not here.

    It skips PyTorch's dispatcher, whose call costs as much as a kernel.
    """
    if name not in _BREAKPOINTS:
        return None
    *inputs, out = tensors
    impl = get_forward_context().impls[layer]
    if hasattr(impl, "bind"):
        run = impl.bind(*inputs, out)
    else:
        run = lambda metadata: impl.forward(*inputs, metadata, out)  # noqa: E731
    return lambda: run(get_forward_context().metadata[layer])


def _write_kv_cache_torch(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    _write_cache_torch(key, kv_cache[:, 0], slot_mapping)
    _write_cache_torch(value, kv_cache[:, 1], slot_mapping)


def _write_cache_torch(value: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots = slot_mapping[: value.shape[0]]
    real = slots >= 0
    slots = slots[real]
    cache[slots // cache.shape[1], slots % cache.shape[1]] = value[real].to(cache.dtype)


def _late(module: str, function: str) -> Callable[..., Any]:
    """`module.function`, imported on the first call: kernels need Triton, which not every machine has."""

    def call(*args: Any) -> Any:
        return getattr(importlib.import_module(f"attention.{module}"), function)(*args)

    return call


def _nothing(*_: object) -> None:
    """An operator that only writes into its arguments has a fake that does nothing."""


def _short_conv_fake(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _implement(name: str, fake: Callable[..., Any], *, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
    for key, function in (("CPU", cpu), ("CUDA", cuda), ("Meta", fake)):
        _library.impl(name, function, key)


_implement("attention", _nothing, cpu=_attention, cuda=_attention)
_implement("compressed_attention", _nothing, cpu=_compressed_attention, cuda=_compressed_attention)
_implement("linear_attention", _nothing, cpu=_linear_attention, cuda=_linear_attention)
# Boolean selection synchronises on a GPU, so there a kernel decides row by row.
_implement("write_kv_cache", _nothing, cpu=_write_kv_cache_torch, cuda=_late("backends.triton.write", "write_kv_cache"))
_implement("write_cache", _nothing, cpu=_write_cache_torch, cuda=_late("backends.triton.write", "write_cache"))
_implement("linear", _linear_fake, cpu=torch.nn.functional.linear, cuda=_late("kernels.linear", "linear"))
_implement(
    "short_conv",
    _short_conv_fake,
    cpu=_late("backends.short_conv.reference", "short_conv"),
    cuda=_late("backends.short_conv.kernels", "short_conv"),
)
_implement(
    "compress_kv",
    _nothing,
    cpu=_late("backends.kv_compressor.reference", "compress_kv"),
    cuda=_late("backends.kv_compressor.kernels", "compress_kv"),
)

attention = torch.ops.mrv2.attention
"""attention(query [T, num_heads, d], kv_cache, out! [T, num_heads, d], layer): see `AttentionImpl.forward`."""
compressed_attention = torch.ops.mrv2.compressed_attention
"""compressed_attention(query [T, num_heads, d], local_cache, compressed_cache, out! [T, num_heads, d], layer)."""
linear_attention = torch.ops.mrv2.linear_attention
"""linear_attention(query, key [T, num_k_heads, dk], value [T, num_v_heads, dv], log_decay, beta [T, num_v_heads],
recurrent_state!, out! [T, num_v_heads, dv], layer)."""
write_kv_cache = torch.ops.mrv2.write_kv_cache
"""write_kv_cache(key [T, num_kv_heads, d], value, kv_cache!, slot_mapping [>= T] int64): one token a slot, -1 none."""
write_cache = torch.ops.mrv2.write_cache
"""write_cache(value [T, ...], cache! [num_blocks, block_size, ...], slot_mapping [>= T] int64)."""
linear = torch.ops.mrv2.linear
"""linear(x [..., K], weight [N, K], bias [N] or None) -> [..., N]: a kernel of our own where few rows are on a GPU."""
short_conv = torch.ops.mrv2.short_conv
"""short_conv(x [T, dim], weight [dim, kernel_size], bias [dim] or None, conv_state!, token_request, query_start_loc,
seq_lens, state_slots, silu) -> [T, dim]: see `ShortConv`."""
compress_kv = torch.ops.mrv2.compress_kv
"""compress_kv(kv [T, dim], score [T, dim], weight [dim], window_state!, compressed_cache!, block_table, token_request,
query_start_loc, seq_lens, state_slots, ratio, eps): see `KVCompressor`."""

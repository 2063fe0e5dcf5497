"""Modules that a model is built from: layers that keep caches, which a runner binds before the first call."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from attention.ops import (
    attention,
    compress_kv,
    compressed_attention,
    linear_attention,
    short_conv,
    write_cache,
    write_kv_cache,
)
from attention.specs import (
    AttentionSpec,
    CompressedAttentionSpec,
    KVCompressorSpec,
    LayerSpec,
    LinearAttentionSpec,
    ShortConvSpec,
    check_at_least,
)

_REQUEST_FACTS = ("token_request", "query_start_loc", "seq_lens", "state_slots")


class CachedLayer(nn.Module, ABC):
    """A layer with caches. It holds none itself: before the first call a runner binds them, and the persistent
    buffers with each step's facts. All are buffers of the module, so a compiled graph takes them as inputs and
    identical layers compile to identical code.

    Calls take the tokens of a step as one flat batch, padding included; rows of padded tokens are undefined in results.
    """

    bound: ClassVar[tuple[str, ...]]
    """Names of the buffers to be bound."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_name = ""
        for name in self.bound:
            self.register_buffer(name, torch.empty(0), persistent=False)

    @abstractmethod
    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> LayerSpec:
        """What this layer computes, for caches of `block_size` tokens a block in `dtype`, when steps may have up to
        `num_draft_tokens` tokens that are rejected afterwards."""

    def _check(self, name: str, tensor: torch.Tensor, like: torch.Tensor, *sizes: int) -> None:
        """ValueError for an operand whose rows are not those of `like`, or not of `sizes`, flat or one by one. Free:
        sizes are known while tracing."""
        given = tuple(tensor.shape[1:])
        if given not in (sizes, (math.prod(sizes),)):
            allowed = f"[T, {math.prod(sizes)}]" + (f" or {['T', *sizes]}".replace("'", "") if len(sizes) > 1 else "")
            got = str(["T", *given]).replace("'", "")
            raise ValueError(f"{type(self).__name__} {self.layer_name!r}: {name} must be {allowed}, got {got}")
        if tensor.shape[0] != like.shape[0]:
            raise ValueError(
                f"{type(self).__name__} {self.layer_name!r}: all operands must have the same number of rows"
            )

    def bind(self, layer_name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Attach caches and the runner's persistent buffers, by name. Before the first call."""
        self.layer_name = layer_name
        for name in self.bound:
            setattr(self, name, tensors[name])


class Attention(CachedLayer):
    """Causal self-attention over a paged cache: writes this step's keys and values, then attends.

    scale: multiplies the scores, default 1 / sqrt(head_size). sliding_window, soft_cap: see `AttentionSpec`.
    """

    bound = ("kv_cache", "slot_mapping")
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        num_kv_heads: int | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.scale = scale if scale is not None else 1 / math.sqrt(head_size)
        self.sliding_window = sliding_window
        self.soft_cap = soft_cap

    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size=block_size,
            dtype=dtype,
            scale=self.scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
        )

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads * head_size] or [T, num_heads, head_size]; key, value likewise with num_kv_heads.

        Returns a tensor of query's shape and dtype.
        """
        shape = query.shape
        self._check("query", query, query, self.num_heads, self.head_size)
        self._check("key", key, query, self.num_kv_heads, self.head_size)
        self._check("value", value, query, self.num_kv_heads, self.head_size)
        query = query.view(-1, self.num_heads, self.head_size)
        key = key.view(-1, self.num_kv_heads, self.head_size)
        value = value.view(-1, self.num_kv_heads, self.head_size)
        out = torch.empty_like(query)
        write_kv_cache(key, value, self.kv_cache, self.slot_mapping)
        attention(query, self.kv_cache, out, self.layer_name)
        return out.view(shape)


class ShortConv(CachedLayer):
    """Causal depthwise convolution: out[p] = sum over j < kernel_size of weight[:, kernel_size - 1 - j] * x[p - j].

    x before a request's first token is zero. With `silu`, the result x becomes x * sigmoid(x). As the convolutions of
    Mamba (https://arxiv.org/abs/2312.00752, section 3.4). Runs inside the pieces.
    """

    bound = ("conv_state", *_REQUEST_FACTS)
    conv_state: torch.Tensor
    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor

    def __init__(self, dim: int, kernel_size: int, *, bias: bool = False, silu: bool = False) -> None:
        super().__init__()
        check_at_least(2, kernel_size=kernel_size)
        self.dim = dim
        self.kernel_size = kernel_size
        self.silu = silu
        self.weight = nn.Parameter(torch.randn(dim, kernel_size) / math.sqrt(kernel_size))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> ShortConvSpec:
        return ShortConvSpec(
            dim=self.dim,
            kernel_size=self.kernel_size,
            block_size=block_size,
            dtype=dtype,
            num_draft_tokens=num_draft_tokens,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, dim] -> [T, dim], of x's dtype."""
        self._check("x", x, x, self.dim)
        facts = (self.token_request, self.query_start_loc, self.seq_lens, self.state_slots)
        return short_conv(x, self.weight, self.bias, self.conv_state, *facts, self.silu)


class KVCompressor(CachedLayer):
    """Every full window of `ratio` tokens becomes one entry of a compressed cache, at position // ratio.

    entry = rms_norm(sum over the window of softmax(score) * kv) * weight, elementwise in fp32, softmax over the window.
    Windows that are not full yet wait in a state. Has side effects only, and runs inside the pieces.
    """

    bound = ("compressed_cache", "window_state", "block_table", *_REQUEST_FACTS)
    compressed_cache: torch.Tensor
    window_state: torch.Tensor
    block_table: torch.Tensor
    token_request: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor

    def __init__(self, dim: int, ratio: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.ratio = ratio
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> KVCompressorSpec:
        return KVCompressorSpec(
            dim=self.dim, ratio=self.ratio, block_size=block_size, dtype=dtype, num_draft_tokens=num_draft_tokens
        )

    def forward(self, kv: torch.Tensor, score: torch.Tensor) -> None:
        """kv, score [T, dim]."""
        facts = (self.token_request, self.query_start_loc, self.seq_lens, self.state_slots)
        state = (self.window_state, self.compressed_cache, self.block_table)
        compress_kv(kv, score, self.weight, *state, *facts, self.ratio, self.eps)


class CompressedAttention(CachedLayer):
    """Causal attention over the last `window` latents and the compressed entries of all that came before.

    One latent per token, shared by all heads, is key and value at once. The query at position p sees the latents at
    positions p - window + 1 to p, and every entry whose window of `ratio` tokens ends at or before p: one softmax
    over both. scale: default 1 / sqrt(head_size).
    """

    bound = ("local_cache", "slot_mapping")
    local_cache: torch.Tensor
    slot_mapping: torch.Tensor

    def __init__(self, num_heads: int, head_size: int, *, window: int, ratio: int, scale: float | None = None) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.window = window
        self.ratio = ratio
        self.scale = scale if scale is not None else 1 / math.sqrt(head_size)
        self.compressor = KVCompressor(head_size, ratio)

    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> CompressedAttentionSpec:
        return CompressedAttentionSpec(
            num_heads=self.num_heads,
            head_size=self.head_size,
            window=self.window,
            ratio=self.ratio,
            scale=self.scale,
            block_size=block_size,
            dtype=dtype,
        )

    def forward(self, query: torch.Tensor, latent: torch.Tensor, kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads * head_size]; latent, kv, score [T, head_size], the last two for the compressor.

        Returns a tensor of query's shape and dtype.
        """
        self._check("query", query, query, self.num_heads, self.head_size)
        for name, tensor in (("latent", latent), ("kv", kv), ("score", score)):
            self._check(name, tensor, query, self.head_size)
        heads = query.view(-1, self.num_heads, self.head_size)
        out = torch.empty_like(heads)
        write_cache(latent, self.local_cache, self.slot_mapping)
        self.compressor(kv, score)
        compressed_attention(heads, self.local_cache, self.compressor.compressed_cache, out, self.layer_name)
        return out.view(query.shape)


class LinearAttention(CachedLayer):
    """The gated delta rule: a recurrent state [head_k_size, head_v_size] for each request and value head.

    S_t = a_t * S_{t-1} + k_t (x) (beta_t * (v_t - a_t * S_{t-1}^T k_t)) with a_t = exp(log_decay_t), and
    o_t = scale * S_t^T q_t (https://arxiv.org/abs/2412.06464, equation 10). Value head h reads key head
    h // (num_v_heads // num_k_heads). Keys should have length 1 or less for a stable recurrence.
    """

    bound = ("recurrent_state",)
    recurrent_state: torch.Tensor

    def __init__(
        self,
        num_v_heads: int,
        head_k_size: int,
        head_v_size: int,
        *,
        num_k_heads: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.num_v_heads = num_v_heads
        self.num_k_heads = num_v_heads if num_k_heads is None else num_k_heads
        self.head_k_size = head_k_size
        self.head_v_size = head_v_size
        self.scale = scale if scale is not None else 1 / math.sqrt(head_k_size)

    def get_spec(self, *, block_size: int, dtype: torch.dtype, num_draft_tokens: int = 0) -> LinearAttentionSpec:
        return LinearAttentionSpec(
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_size=self.head_k_size,
            head_v_size=self.head_v_size,
            scale=self.scale,
            block_size=block_size,
            dtype=dtype,
            num_draft_tokens=num_draft_tokens,
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """query, key [T, num_k_heads * head_k_size]; value [T, num_v_heads * head_v_size]; log_decay (at most 0) and
        beta (0 to 1) [T, num_v_heads]. Returns a tensor of value's shape and dtype.
        """
        self._check("query", query, value, self.num_k_heads, self.head_k_size)
        self._check("key", key, value, self.num_k_heads, self.head_k_size)
        self._check("value", value, value, self.num_v_heads, self.head_v_size)
        self._check("log_decay", log_decay, value, self.num_v_heads)
        self._check("beta", beta, value, self.num_v_heads)
        query = query.view(-1, self.num_k_heads, self.head_k_size)
        key = key.view(-1, self.num_k_heads, self.head_k_size)
        values = value.view(-1, self.num_v_heads, self.head_v_size)
        out = torch.empty_like(values)
        linear_attention(query, key, values, log_decay, beta, self.recurrent_state, out, self.layer_name)
        return out.view(value.shape)


def cached_layers(model: nn.Module) -> dict[str, CachedLayer]:
    """The layers of a model that keep caches, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, CachedLayer)}

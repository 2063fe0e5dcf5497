"""Models of well-known shapes with random weights: nothing is downloaded, and no time depends on their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

_WEIGHT_GAIN = 0.64
"""Weights have this over the root of their inputs as standard deviation (0.02 for 1024 of them), so that layers of any
width scale their input alike: wide ones would else blow up each rounding error until no output could be checked."""


def qwen3_600m() -> PretrainedConfig:
    return Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def llama_8b() -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=False,
    )


def tiny() -> PretrainedConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3-0.6b": qwen3_600m,
    "llama-3.1-8b": llama_8b,
    "tiny": tiny,
}


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on the CPU, where scripts are only tried out."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


@torch.no_grad()
def build(shape: str, device: torch.device, *, seed: int = 0) -> Any:
    """A causal language model of `shape` on `device`, in eval mode, with transformers' own attention.

    Weights are drawn where they stay: transformers' own initialisation would first fill them on the host.
    """
    model = on_meta(shape, dtype_on(device)).to_empty(device=device)
    model.tie_weights()  # to_empty gives tied weights memory of their own
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() > 1:
                weight.normal_(0, _WEIGHT_GAIN / weight.shape[1] ** 0.5, generator=generator)
            else:
                weight.fill_(1.0 if name == "weight" else 0.0)  # of a norm, or a bias
    _rebuild_rotary(model, device)
    return model.eval().requires_grad_(False)


def on_meta(shape: str, dtype: torch.dtype) -> Any:
    """The model without memory: to count its parameters."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    return model


def _rebuild_rotary(model: nn.Module, device: torch.device) -> None:
    """Buffers are in no checkpoint and `to_empty` leaves them undefined: build anew the modules that compute them."""
    for name, module in list(model.named_modules()):
        if any(True for _ in module.buffers(recurse=False)):
            if not hasattr(module, "inv_freq"):
                raise ValueError(
                    f"{name} has buffers that nothing here computes: {[n for n, _ in module.named_buffers()]}"
                )
            rebuilt: Any = type(module)(config=module.config)
            model.set_submodule(name, rebuilt.to(device))

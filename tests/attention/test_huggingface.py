"""Decoders of several families, tiny and random, against transformers' own generation."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from attention.huggingface import PagedCausalLM, load
from piecewise_backend.runner import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 16},
    "Mistral": {"head_dim": 16, "sliding_window": 9},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
    "Gemma": {"head_dim": 16},
    "Gemma2": {
        "head_dim": 16,
        "sliding_window": 9,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
    },
    "Phi3": {},
    "Phi": {},
    "Granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "Olmo2": {},
    "Starcoder2": {"sliding_window": 9},
}
PROMPTS = [[5], list(range(2, 30)), [7, 3, 9, 50, 11], [40] * 13]


def make(family: str) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def generate(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return output[0, len(prompt) :].tolist()


def make_llm(model: Any, mode: str, **limits: Any) -> LLM:
    options = {"recorder": "emulated", "compiler": "eager", "cache": False, "capture_sizes": [1, 4, 16]}
    return LLM(
        model, mode=mode, options=options, device="cpu", max_num_tokens=16, max_num_reqs=4, max_model_len=64, **limits
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_generates_what_transformers_generates(family: str) -> None:
    model = make(family)
    expected = [generate(model, prompt, 14) for prompt in PROMPTS]
    llm = make_llm(model, "FULL_AND_PIECEWISE")
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=14))
    assert [c.token_ids for c in completions] == expected
    assert llm.report.num_replays > 0


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_a_llama_on_the_triton_backend_generates_what_transformers_generates(mode: str) -> None:
    model = make("Llama")
    expected = [generate(model, prompt, 8) for prompt in PROMPTS]
    llm = make_llm(model, mode, attention_backend="triton")
    assert {g.backend.name for g in llm.runner.groups} == {"triton"}
    completions = llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert [c.token_ids for c in completions] == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_sixteen_prompts_of_up_to_200_tokens_on_the_triton_backend(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "max_position_embeddings", 512)
    model, rng = make("Llama"), random.Random(0)
    lengths = [1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 64, 65, 100, 128, 150, 200]
    prompts = [[rng.randrange(2, 96) for _ in range(length)] for length in lengths]
    options = {"recorder": "emulated", "compiler": "eager", "cache": False, "capture_sizes": [4, 16, 64]}
    limits = {"max_num_tokens": 64, "max_num_reqs": 16, "max_model_len": 256}
    expected = [generate(model, prompt, 32) for prompt in prompts]
    llm = LLM(model, mode=mode, options=options, device="cpu", attention_backend="triton", **limits)
    completions = llm.generate(prompts, SamplingParams(max_tokens=32))
    assert [c.token_ids for c in completions] == expected


def test_layers_with_and_without_a_window_are_different_groups() -> None:
    llm = make_llm(make("Gemma2"), "NONE")
    assert sorted((g.spec.sliding_window or 0) for g in llm.runner.groups) == [0, 9]
    assert all(g.spec.soft_cap == 5.0 for g in llm.runner.groups)


def test_a_model_saved_to_a_folder_loads_with_one_call(tmp_path: Any) -> None:
    model = make("Llama")
    model.save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=_word_tokenizer())
    tokenizer.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert isinstance(loaded.model, PagedCausalLM)
    expected = generate(model, loaded.tokenizer("w5 w6 w7")["input_ids"], 5)
    completion = make_llm(str(tmp_path), "NONE").generate("w5 w6 w7", SamplingParams(max_tokens=5))[0]
    assert completion.token_ids == expected
    assert completion.text.startswith(f"w{expected[0]}")


def _word_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@pytest.mark.parametrize("source", ["nowhere", "nowhere.gguf"])
def test_a_model_that_does_not_exist_is_named_with_what_would_work(source: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no model at '{source}': give a local folder"):
        load(source)


def test_a_folder_without_a_model_is_named(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither a config.json nor exactly one .gguf"):
        load(tmp_path)


def test_an_encoder_is_refused() -> None:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        is_decoder=False,
    )
    with pytest.raises(ValueError, match="not causal"):
        PagedCausalLM(transformers.BertForMaskedLM(config))


def test_the_attention_function_without_a_cache_says_what_to_do() -> None:
    from attention.huggingface import register

    register()
    model = make("Llama")
    model.set_attn_implementation("mrv2")
    with pytest.raises(RuntimeError, match=r"wrap the model in attention\.huggingface\.PagedCausalLM"):
        model(input_ids=torch.tensor([[1, 2]]))


def test_a_model_that_was_served_is_copied_and_saved_as_it_was(tmp_path: Path) -> None:
    """Its linear layers were merged meanwhile, so weights lie side by side in one tensor."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    options = {"compiler": "eager", "recorder": "none", "cache": False}
    LLM(model, device="cpu", options=options, max_num_tokens=32, max_num_reqs=2, max_model_len=64)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.k_proj.weight.untyped_storage().data_ptr()
    copied = copy.deepcopy(model).state_dict()
    model.save_pretrained(tmp_path)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for name, weight in before.items():
        assert torch.equal(copied[name], weight), name
        assert torch.equal(saved[name], weight), name

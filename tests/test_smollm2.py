"""A real language model, token for token as transformers generates it, in every mode."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import piecewise_backend
from attention.huggingface import PagedCausalLM, _locate, first_layers
from piecewise_backend.compile import forget_compiled_pieces
from piecewise_backend.runner import LLM, DraftModel, PromptLookup, SamplingParams, Speculator
from tests.piecewise_backend.test_dumping import check_links

LENGTHS = [1, 2, 3, 5, 8, 16, 17, 31, 33, 48, 64, 65, 100, 128, 150, 200]
NEW_TOKENS = 32
TEXT = "The history of mathematics deals with the origin of discoveries and the mathematical methods of the past. " * 20
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]


@pytest.fixture(scope="module")
def loaded() -> Any:
    folder, kwargs = _locate("smollm2")
    config = transformers.AutoConfig.from_pretrained(folder, **kwargs)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, **kwargs)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, **kwargs)
    return model.eval(), tokenizer


@pytest.fixture(scope="module")
def prompts(loaded: Any) -> list[list[int]]:
    rng = random.Random(0)
    tokens = loaded[1](TEXT)["input_ids"]
    return [tokens[(start := rng.randrange(50)) : start + length] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(loaded: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers' own generate gives, prompt by prompt."""
    found = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            output = loaded[0].generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False
            )
            found.append(output[0, len(prompt) :].tolist())
    return found


@pytest.fixture(scope="module")
def smollm2(loaded: Any, expected: list[list[int]]) -> PagedCausalLM:
    """The same model on paged attention; asked for after `expected`, since its attention is replaced."""
    return PagedCausalLM(loaded[0])


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("artifacts"))


def start(smollm2: PagedCausalLM, mode: str, cache_dir: str, speculator: Speculator | None = None) -> LLM:
    options = {"recorder": "emulated", "capture_sizes": [1, 4, 8, 16, 64], "cache_dir": cache_dir}
    return LLM(
        smollm2,
        mode=mode,
        options=options,
        device="cpu",
        attention_backend="torch",
        max_num_tokens=64,
        max_num_reqs=16,
        max_model_len=256,
        speculator=speculator,
    )


@pytest.mark.parametrize("mode", MODES)
def test_sixteen_prompts_in_one_batch_get_what_transformers_generates(
    mode: str, smollm2: PagedCausalLM, prompts: list[list[int]], expected: list[list[int]], cache_dir: str
) -> None:
    torch._dynamo.utils.counters.clear()
    llm = start(smollm2, mode, cache_dir)
    completions = llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS))
    assert [c.token_ids for c in completions] == expected
    report = llm.report
    assert report.mode_resolved == mode
    assert (report.num_pieces, report.num_breakpoints, len(report.compiled)) == (31, 30, 3)
    traces = {"traced": 1, "disk": 0}[report.program_source]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traces, "at most one trace for all sizes"
    assert (report.num_replays > 0) == (mode != "NONE")
    assert (report.uncaptured_runs > 0) == (mode == "NONE")
    graphs = {s.descriptor.split()[0]: s.num_graphs for s in report.sizes}
    assert graphs.get("FULL", 1) == 1
    assert graphs.get("PIECEWISE", 31) == 31


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["lookup", "first layers"])
def test_guessing_ahead_gives_the_tokens_of_plain_greedy(
    method: str,
    mode: str,
    smollm2: PagedCausalLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    cache_dir: str,
) -> None:
    speculator = PromptLookup(3) if method == "lookup" else DraftModel(first_layers(smollm2, 6), 3)
    llm = start(smollm2, mode, cache_dir, speculator)
    completions = llm.generate(prompts[:8], SamplingParams(max_tokens=16))
    assert [c.token_ids for c in completions] == [e[:16] for e in expected[:8]]
    report = llm.report
    assert report.speculation.proposed > 0
    assert f"{report.speculation.accepted} of {report.speculation.proposed} guesses" in str(report)
    decode = [s for s in report.sizes if s.descriptor.startswith("FULL decode x4") and s.replays]
    assert bool(decode) == (mode in ("FULL", "FULL_AND_PIECEWISE"))
    assert (report.draft is None) == (method == "lookup")


def test_the_first_layers_of_a_model_share_its_weights_and_not_its_caches(smollm2: PagedCausalLM) -> None:
    shallow = first_layers(smollm2, 2)
    weights = {p.data_ptr() for p in smollm2.parameters()}
    assert {p.data_ptr() for p in shallow.parameters()} <= weights
    assert len(shallow.backbone.layers) == 2
    assert len(smollm2.backbone.layers) == 30
    assert smollm2.config.num_hidden_layers == 30
    with pytest.raises(ValueError, match="from 1 to 30"):
        first_layers(smollm2, 31)


def test_pieces_kept_on_disk_are_not_compiled_again(
    smollm2: PagedCausalLM, prompts: list[list[int]], expected: list[list[int]], cache_dir: str
) -> None:
    start(smollm2, "NONE", cache_dir)
    forget_compiled_pieces()
    llm = start(smollm2, "NONE", cache_dir)
    assert list(llm.report.compiled.values()) == ["disk"] * 3
    completions = llm.generate(prompts[:3], SamplingParams(max_tokens=4))
    assert [c.token_ids for c in completions] == [e[:4] for e in expected[:3]]


def test_a_dump_of_a_start_shows_every_piece_in_files_that_can_be_imported(
    smollm2: PagedCausalLM, cache_dir: str, tmp_path: Path
) -> None:
    with piecewise_backend.dump(tmp_path / "dump"):
        llm = start(smollm2, "FULL_AND_PIECEWISE", cache_dir)
    assert llm.report.program_source == "traced", "a program on disk has no graphs to show"
    links = check_links(tmp_path / "dump")
    pieces = [name for name in links if re.fullmatch(r"graph_0/piece_\w+\.py", name)]
    assert sum(not name.endswith("_inductor.py") for name in pieces) == 3
    assert sum(name.endswith("_inductor.py") for name in pieces) == 3
    (dynamo,) = (name for name in links if re.fullmatch(r"dynamo_0_\w+\.py", name))
    assert "decompiled" in (tmp_path / "dump" / dynamo).read_text()

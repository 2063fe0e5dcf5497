"""Wrong prompts, parameters and models: a clear error, nothing silently wrong, and everybody else is served."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attention.layers import Attention, CompressedAttention, LinearAttention, ShortConv
from piecewise_backend.runner import LLM, Engine, PromptLookup, SamplingParams
from tests.hybrid import HybridDecoder
from tests.tiny import HIDDEN, VOCAB, TinyDecoder, make_runner, oracle_greedy, work


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("max_tokens", float("nan")),
        ("max_tokens", None),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-45),
        ("temperature", "0.5"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("seed", 2**70),
        ("seed", "a"),
        ("seed", 1.5),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", "5"),
        ("stop_token_ids", (1.5,)),
    ],
)
def test_sampling_parameters_that_make_no_sense_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be .*got"):
        SamplingParams(**{name: value})


def test_integers_of_any_kind_are_taken() -> None:
    params = SamplingParams(max_tokens=np.int64(3), top_k=np.int32(2), temperature=1, seed=-1, stop_token_ids=[1, 2])
    assert params.max_tokens == 3


def make_llm(model: nn.Module | None = None, **settings: Any) -> LLM:
    options = {"recorder": "emulated", "compiler": "eager", "cache": False, "capture_sizes": [1, 2, 4, 16]}
    limits = {"max_num_tokens": 16, "max_num_reqs": 4, "max_model_len": 64, "vocab_size": VOCAB} | settings
    return LLM(model or TinyDecoder(), device="cpu", options=options, **limits)


@pytest.mark.parametrize(
    "prompts",
    [
        [1, 2, 3],
        (1, 2, 3),
        np.array([1, 2, 3]),
        torch.tensor([1, 2, 3]),
        [np.int64(1), np.int64(2), np.int64(3)],
        torch.tensor([[1, 2, 3]]),
        (ids for ids in ([1, 2, 3],)),
    ],
    ids=["list", "tuple", "array", "tensor", "numpy ints", "rows", "generator"],
)
def test_a_prompt_may_come_in_any_form_that_holds_integers(prompts: Any) -> None:
    model = TinyDecoder()
    (result,) = make_llm(model).generate(prompts, SamplingParams(max_tokens=3))
    assert result.token_ids == oracle_greedy(model, [1, 2, 3], 3)


def test_one_prompt_that_is_none_is_refused_and_leaves_nothing_behind() -> None:
    model = TinyDecoder()
    llm, three = make_llm(model), SamplingParams(max_tokens=3)
    results = llm.generate([[1, 2], None, [1.5], ["1"], [3]], three)  # type: ignore[list-item]
    assert [r.error is None for r in results] == [True, False, False, False, True]
    assert results[4].token_ids == oracle_greedy(model, [3], 3)
    for prompts, params, message in (
        (5, three, "got int"),
        ({"input_ids": [1]}, three, r"give \['input_ids'\]"),
        ([[1]], {"max_tokens": 3}, "params must be a SamplingParams.*got dict"),
        ([[1], [2]], [three, None], "got NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, params)  # type: ignore[arg-type]
    assert not llm.engine.has_work
    assert llm.generate([4], three)[0].token_ids == oracle_greedy(model, [4], 3)


def test_an_id_of_the_users_own_does_not_take_the_engines_names() -> None:
    llm, params = make_llm(), SamplingParams(max_tokens=2)
    llm.engine.add([1], params, "request-1")
    assert all(r.error is None for r in llm.generate([[1], [2], [3]], params))


class Fails(Exception):
    pass


def serve(engine: Engine, failing: tuple[int, ...] = ()) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for index in range(60):
        if not engine.has_work:
            return tokens
        engine.fail = index in failing  # type: ignore[attr-defined]
        try:
            new = engine.step()
        except Fails:
            continue
        for token in new:
            tokens.setdefault(token.request_id, []).append(token.token_id)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("part", ["execute", "choose"])
@pytest.mark.parametrize("speculates", [False, True])
def test_a_step_that_raises_is_as_if_it_had_not_been(
    part: str, speculates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of models with recurrent states too: what the failed step left in them is not used."""

    def tokens(failing: tuple[int, ...]) -> dict[str, list[int]]:
        speculator = PromptLookup(2) if speculates else None
        torch.manual_seed(0)
        runner = make_runner("NONE", model=HybridDecoder(), speculator=speculator, max_num_tokens=48)
        engine = Engine(runner, vocab_size=VOCAB)
        where = runner if part == "execute" else engine.sampler
        real = getattr(where, part)

        def sometimes(*args: Any) -> Any:
            result = real(*args)  # the work is done, and then it fails
            if engine.fail:  # type: ignore[attr-defined]
                raise Fails
            return result

        monkeypatch.setattr(where, part, sometimes)
        for prompt in ([1, 2, 3, 1, 2], [4, 5], [6] * 9):
            engine.add(prompt, SamplingParams(max_tokens=8))
        return serve(engine, failing)

    assert tokens((0, 3, 4)) == tokens(())


class Returns(TinyDecoder):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.change(super().forward(input_ids, positions))


@pytest.mark.parametrize(
    "change",
    [lambda x: (x, x * 2), lambda x: x[None], lambda x: x[-1:], lambda x: x.sum(-1), lambda x: None, lambda x: x.T],
    ids=["two tensors", "batch dimension", "last row", "one dimension", "nothing", "transposed"],
)
def test_a_model_whose_result_is_no_row_for_each_token_is_refused(change: Any) -> None:
    with pytest.raises(ValueError, match=r"Returns.forward must return one tensor \[T, H\]"):
        make_runner("FULL_AND_PIECEWISE", model=Returns(change))


def test_a_tuple_or_dictionary_of_one_tensor_is_taken() -> None:
    for change in (lambda x: (x,), lambda x: {"hidden": x}):
        assert make_runner("NONE", model=Returns(change)).execute([work("a", [1], 0, [0])]).shape == (1, VOCAB)


class Twice(nn.Module):
    """One layer called twice in a pass, as where weights are shared between layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.embed = kind, nn.Embedding(VOCAB, HIDDEN)
        self.layer = Attention(2, 16) if kind == "attention" else ShortConv(HIDDEN, 3)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for _ in range(2):
            x = x + (self.layer(x, x, x) if self.kind == "attention" else self.layer(x))
        return x


@pytest.mark.parametrize("kind", ["attention", "short_conv"])
def test_a_layer_that_is_called_twice_in_a_pass_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"called twice in one forward .{kind} on .*layer object for each call"):
        make_runner("NONE", model=Twice(kind))


class Wide(nn.Module):
    """Hands its layer operands of one width."""

    def __init__(self, layer: nn.Module, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.widths, self.embed = layer, widths, nn.Embedding(VOCAB, 64)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        return self.layer(*(x[:, :width].contiguous() for width in self.widths))


@pytest.mark.parametrize(
    ("layer", "widths", "message"),
    [
        (
            lambda: Attention(4, 16, num_kv_heads=2),
            (64, 64, 64),
            r"key must be \[T, 32\] or \[T, 2, 16\], got \[T, 64\]",
        ),
        (lambda: Attention(2, 16), (64, 32, 32), r"query must be \[T, 32\].*got \[T, 64\]"),
        (lambda: ShortConv(32, 3), (64,), r"x must be \[T, 32\], got \[T, 64\]"),
        (lambda: LinearAttention(2, 8, 8), (16, 32, 16, 2, 2), r"key must be \[T, 16\]"),
        (lambda: LinearAttention(2, 8, 8), (16, 16, 16, 1, 2), r"log_decay must be \[T, 2\], got \[T, 1\]"),
        (
            lambda: CompressedAttention(2, 16, window=8, ratio=4),
            (32, 1, 16, 16),
            r"latent must be \[T, 16\], got \[T, 1\]",
        ),
    ],
)
def test_operands_of_another_width_are_refused_with_the_line_that_gives_them(
    layer: Any, widths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=rf"test_bad_input.py:\d+: return self.layer.*{message}"):
        make_runner("NONE", model=Wide(layer(), widths))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(4, 16, soft_cap=0.0), "soft_cap must be finite and above 0"),
        (lambda: Attention(4, 16, scale=float("nan")), "scale must be finite"),
        (lambda: Attention(4, 16, sliding_window=2.5), "sliding_window must be an integer"),  # type: ignore[arg-type]
        (lambda: Attention(4, 16, num_kv_heads=0), "multiple of num_kv_heads, got 4 and 0"),
        (lambda: LinearAttention(4, 16, 16, num_k_heads=0), "num_k_heads must be an integer of at least 1"),
        (lambda: CompressedAttention(4, 16, window=1.5, ratio=4), "window must be an integer"),  # type: ignore[arg-type]
    ],
)
def test_layers_that_make_no_sense_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make().get_spec(block_size=16, dtype=torch.float32)


@pytest.mark.parametrize("limits", [{"num_blocks": 0}, {"num_blocks": -5}, {"max_num_tokens": 16.0}, {"vocab_size": 0}])
def test_limits_are_integers_of_at_least_one(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be an integer of at least 1"):
        make_llm(**limits)


class OfBytes(TinyDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.aaa = nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False)
        self._parameters = {"aaa": self.aaa, **{k: v for k, v in self._parameters.items() if k != "aaa"}}


def test_caches_have_the_dtype_of_the_first_parameter_that_is_a_floating_point_number() -> None:
    runner = make_runner("NONE", model=OfBytes())
    assert {layer.kv_cache.dtype for layer in runner.layers.values()} == {torch.float32}


class Heads(TinyDecoder):
    def __init__(self, change: Any) -> None:
        super().__init__()
        self.change = change

    def compute_logits(self, hidden: torch.Tensor) -> Any:
        return self.change(super().compute_logits(hidden))


@pytest.mark.parametrize("change", [lambda x: x[-1:], lambda x: x[None], lambda x: (x,), lambda x: None])
def test_a_head_that_gives_no_row_for_each_row_is_named(change: Any) -> None:
    runner = make_runner("NONE", model=Heads(change))
    with pytest.raises(ValueError, match=r"Heads.compute_logits must return logits \[R, V\].*for 2 rows it gave"):
        runner.execute([work("a", [1], 0, [0]), work("b", [2], 0, [1])])


def test_threads_may_share_one_model() -> None:
    model = TinyDecoder()
    llm, prompts = make_llm(model), [[[n, n + 1], [n + 2]] for n in range(0, 40, 10)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(lambda each: llm.generate(each, SamplingParams(max_tokens=9)), prompts))
    for each, completions in zip(prompts, results, strict=True):
        assert [c.token_ids for c in completions] == [oracle_greedy(model, p, 9) for p in each]
    assert not llm.engine.has_work
    assert not llm._arrived


def test_a_request_that_is_not_there_cannot_be_aborted() -> None:
    with pytest.raises(KeyError, match="no request 'x' is being served"):
        make_llm().engine.abort("x")


def test_a_tokenizer_that_fails_leaves_no_prompt_behind() -> None:
    def tokenizer(text: str) -> dict[str, list[int]]:
        if text == "bad":
            raise RuntimeError("the tokenizer is broken")
        return {"input_ids": [1, 2]}

    llm = make_llm()
    llm.tokenizer = tokenizer
    with pytest.raises(RuntimeError, match="tokenizer is broken"):
        llm.generate(["good", "bad"])
    assert not llm.engine.has_work
    assert not llm._arrived

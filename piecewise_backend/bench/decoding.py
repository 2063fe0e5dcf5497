"""Contenders that decode: transformers' own loops, and this project's engine in its modes, step by step."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from piecewise_backend.bench.contenders import EMULATED, MODES, Contender, Skipped, is_emulated, recorder_for
from piecewise_backend.bench.engine_loop import EngineLoop, EngineSettings, prefill_steps
from piecewise_backend.bench.logits import CHECK_PREFILL, CHECK_TOKENS, compare, expected_logits, make_prompts
from piecewise_backend.bench.rounds import synchronize, time_interleaved

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """What all contenders have in common."""

    device: torch.device
    batches: tuple[int, ...] = (1, 8)
    context: int = 128
    """Tokens of each prompt."""
    steps: int = 4
    """Decode steps of one slot."""
    rounds: int = 15
    warmup: int = 3
    chunk: int = 512
    recorder: str | None = None
    attention_backend: str | None = None
    vocab_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def new_tokens(self) -> int:
        return self.steps * (self.warmup + self.rounds) + 2

    @property
    def max_len(self) -> int:
        """Tokens of a request at the end, with those that it is ahead of later ones."""
        largest = max(self.batches)
        return max(self.context, CHECK_TOKENS) + self.new_tokens + prefill_steps(largest, self.context, self.chunk) + 1


def bench_decoding(
    plain: Any, paged: Any, names: Sequence[str], settings: DecodeSettings
) -> dict[str, dict[str, Record]]:
    """Batch ("batch 8") to contender to record: the check of its logits, then times, in rounds that go through all.

    plain: the model with its own attention, which says what is right; None where there is none (a model made of
    attention layers): then mode NONE does. paged: the same model for the engine.
    """
    contenders, failed = _make(plain, paged, names, settings)
    vocab_size = settings.vocab_size or paged.config.vocab_size
    prompts = make_prompts(max(settings.batches), CHECK_TOKENS, vocab_size, seed=1)
    cases: dict[str, dict[str, Record]] = {}
    expected = expected_logits(plain, prompts, CHECK_PREFILL) if plain is not None else None
    for num_reqs in settings.batches:
        records = cases[f"batch {num_reqs}"] = {name: {} for name in (*contenders, *failed)}
        for name, record in failed.items():
            records[name] |= record
        wanted = None if expected is None else expected[:num_reqs]
        right = _check_all(contenders, records, prompts[:num_reqs], wanted, settings)
        _time_all(right, records, make_prompts(num_reqs, settings.context, vocab_size, seed=2), settings)
    return cases


def label(name: str) -> str:
    """A contender's name in tables."""
    return f"mrv2 {name}" if name in MODES else name


def _make(
    plain: Any, paged: Any, names: Sequence[str], settings: DecodeSettings
) -> tuple[dict[str, tuple[Contender, bool]], dict[str, Record]]:
    """(contenders with whether they are emulated, records of those that cannot run)."""
    found: dict[str, tuple[Contender, bool]] = {}
    failed: dict[str, Record] = {}
    for name in names:
        try:
            found[label(name)] = _make_one(name, plain, paged, settings)
        except (Skipped, ImportError) as why:
            failed[label(name)] = {"skipped": str(why)}
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            failed[label(name)] = {"error": f"{type(error).__name__}: {error}"}
    return found, failed


def _make_one(name: str, plain: Any, paged: Any, settings: DecodeSettings) -> tuple[Contender, bool]:
    if name in MODES:
        recorder = recorder_for(name, settings.device, settings.recorder)
        engine = EngineSettings(
            options={"recorder": recorder, "capture_sizes": list(settings.batches), **settings.options},
            max_num_reqs=max(settings.batches),
            max_model_len=settings.max_len,
            chunk=max(settings.chunk, max(settings.batches), CHECK_TOKENS),
            vocab_size=settings.vocab_size,
        )
        return EngineLoop(paged, name, settings.attention_backend, engine), is_emulated(name, recorder)
    if plain is None:
        raise Skipped("a model made of attention layers runs on the runner's caches only")
    from piecewise_backend.bench.transformers_loop import CompiledLoop, EagerLoop

    if name == "eager":
        return EagerLoop(plain), False
    if name == "reduce-overhead" and settings.device.type != "cuda":
        raise Skipped(f"no CUDA graphs on {settings.device}, so this would be inductor")
    return CompiledLoop(plain, "default" if name == "inductor" else name), False


def _check_all(
    contenders: Mapping[str, tuple[Contender, bool]],
    records: dict[str, Record],
    prompts: torch.Tensor,
    expected: torch.Tensor | None,
    settings: DecodeSettings,
) -> dict[str, Contender]:
    """The contenders whose logits are right and whose time means something."""
    right: dict[str, Contender] = {}
    for contender, _ in contenders.values():
        contender.begin(len(prompts), settings.max_len)  # all of them first: torch's own forget compiled code here
    for name, (contender, emulated) in contenders.items():
        record = records[name]
        try:
            logits = contender.forced_logits(prompts, CHECK_PREFILL)
        except Exception as error:  # the others are measured all the same
            traceback.print_exc()
            record["error"] = f"{type(error).__name__}: {error}"
            continue
        if expected is None:
            expected = logits  # of the first, which is mode NONE
        record |= {"check": compare(logits, expected), "facts": contender.facts()}
        if emulated:
            record["emulated"] = EMULATED
        elif record["check"]["passed"]:
            right[name] = contender
    return right


def _time_all(
    right: Mapping[str, Contender], records: dict[str, Record], prompts: torch.Tensor, settings: DecodeSettings
) -> None:
    if not right:
        return
    for contender in right.values():
        contender.prefill(prompts, settings.new_tokens)
    synchronize()
    runs = {name: _step_of(contender, len(prompts)) for name, contender in right.items()}
    times = time_interleaved(runs, rounds=settings.rounds, warmup=settings.warmup, calls=settings.steps)
    for name, contender in right.items():
        records[name] |= times[name] | {"facts": contender.facts()}
        contender.finish()


def _step_of(contender: Contender, num_reqs: int) -> Callable[[], None]:
    def step() -> None:
        tokens = contender.step()
        if tokens != num_reqs:
            raise RuntimeError(f"a step of {num_reqs} requests gave {tokens} tokens: not the steady state")

    return step

"""`LLM(model).generate(prompts)`: a model to text in two calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecewise_backend.config import parse_options
from piecewise_backend.dumping.dump import dump_if_asked
from piecewise_backend.reasons import Reason, ReasonCode
from piecewise_backend.reporting.report import Report
from piecewise_backend.runner.config import RunnerConfig
from piecewise_backend.runner.data_parallel import DataParallel
from piecewise_backend.runner.engine import Engine, NewToken
from piecewise_backend.runner.model_runner import ModelRunner
from piecewise_backend.runner.request import SamplingParams
from piecewise_backend.runner.speculation import Speculator

Prompt = str | Sequence[int]

_LONGEST_DEFAULT = 2048


@dataclass(slots=True)
class Completion:
    """What became of one prompt."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """"stop", "length", or "refused"."""
    error: str | None = None
    """Why the prompt was refused; the others were served."""
    _tokenizer: Any = None

    @property
    def text(self) -> str:
        """The new text. ValueError for a refused prompt, or without a tokenizer."""
        if self.error is not None:
            raise ValueError(self.error)
        if self._tokenizer is None:
            raise ValueError("this model has no tokenizer; read token_ids")
        return self._tokenizer.decode(self.token_ids, skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of streamed text."""

    index: int
    """Which prompt it continues."""
    text: str
    token_id: int
    finish_reason: str | None


class LLM:
    """A model with its engine.

    model: a folder, a GGUF file or "smollm2"; a transformers causal language model; or any module that `ModelRunner`
    runs (then give `vocab_size`, and `tokenizer` for text prompts). options: as `torch.compile(options=...)`; the
    other keywords are `RunnerConfig`'s. speculator: `PromptLookup(3)` or `DraftModel(small_model, 3)` guess tokens
    ahead, which changes no greedy token and no distribution. data_parallel: `DataParallel()` where torch.distributed
    ranks run the same model in step; every rank then calls `generate` equally often, with no prompts if it has none.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        vocab_size: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
        speculator: Speculator | None = None,
        data_parallel: DataParallel | None = None,
        **limits: Any,
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dump_if_asked()
        parsed = parse_options(options, mode)
        module, found = _as_module(model, dtype, self.device)
        self.tokenizer = tokenizer or found
        hf_config = getattr(module, "config", None)
        longest = getattr(hf_config, "max_position_embeddings", _LONGEST_DEFAULT)
        limits.setdefault("max_model_len", min(longest, _LONGEST_DEFAULT))
        vocab_size = vocab_size or getattr(hf_config, "vocab_size", None)
        if vocab_size is None:
            raise ValueError(f"{type(module).__name__} has no config.vocab_size; pass vocab_size=")
        self.runner = ModelRunner(
            module,
            RunnerConfig(**limits),
            parsed,
            self.device,
            speculator=speculator,
            data_parallel=data_parallel,
        )
        self.runner.start()
        self._arrived: dict[str, deque[NewToken]] = {}
        self.engine = Engine(self.runner, vocab_size=vocab_size, eos_token_ids=getattr(module, "eos_token_ids", ()))

    @property
    def report(self) -> Report:
        """What was compiled, captured and replayed."""
        return self.runner.report

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete every prompt (text or token ids) in one continuous batch; results are in order.

        A prompt that cannot be served has `error` set, and the others are served.
        """
        completions, index_of = self._submit(prompts, params)
        for token in self._serve(index_of):
            completion = completions[index_of[token.request_id]]
            completion.token_ids.append(token.token_id)
            completion.finish_reason = token.finish_reason
        return completions

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[Chunk]:
        """As `generate`, yielding text as it comes. Leaving the loop early aborts what is unfinished.

        ValueError, before anything runs, for a prompt that cannot be served.
        """
        completions, index_of = self._submit(prompts, params)
        refused = [c.error for c in completions if c.error is not None]
        if refused:
            self._abort(index_of)
            raise ValueError(refused[0])
        shown = [""] * len(completions)
        for token in self._serve(index_of):
            index = index_of[token.request_id]
            completions[index].token_ids.append(token.token_id)
            text = self._new_text(completions[index], shown[index], is_last=token.finish_reason is not None)
            shown[index] += text
            yield Chunk(index, text, token.token_id, token.finish_reason)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. ValueError for text without a tokenizer."""
        if not isinstance(prompt, str):
            return [int(t) for t in prompt]
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: pass tokenizer= to LLM, or give token ids")
        return self.tokenizer(prompt)["input_ids"]

    def _serve(self, request_ids: Iterable[str]) -> Iterator[NewToken]:
        """Step the engine until these requests are finished. Tokens of other requests wait for their own reader, so
        calls may overlap; leaving early aborts what is unfinished."""
        self.engine.rejoin()
        unfinished = set(request_ids)
        self._arrived.update({request_id: deque() for request_id in unfinished})
        try:
            while unfinished:
                for request_id in list(unfinished):
                    while self._arrived[request_id]:
                        token = self._arrived[request_id].popleft()
                        if token.finish_reason is not None:
                            unfinished.discard(request_id)
                        yield token
                if unfinished and not any(self._arrived[r] for r in unfinished):
                    for token in self.engine.step():
                        self._arrived.setdefault(token.request_id, deque()).append(token)
        finally:
            self._abort(unfinished)
            self.engine.drain()
            for request_id in request_ids:
                self._arrived.pop(request_id, None)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.engine.abort(request_id)

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[Completion], dict[str, int]]:
        each: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        given = [params or SamplingParams()] * len(each) if not isinstance(params, Sequence) else list(params)
        if len(given) != len(each):
            raise ValueError(f"{len(each)} prompts need one SamplingParams, or one each; got {len(given)}")
        completions = [Completion(_tokenizer=self.tokenizer) for _ in each]
        index_of: dict[str, int] = {}
        for index, (prompt, one) in enumerate(zip(each, given, strict=True)):
            try:
                index_of[self.engine.add(self.encode(prompt), one)] = index
            except ValueError as error:
                completions[index].finish_reason, completions[index].error = "refused", str(error)
                self.report.reasons.add(Reason(ReasonCode.REQUEST_REFUSED, f"prompt {index}", str(error)))
        return completions, index_of

    def _new_text(self, completion: Completion, shown: str, *, is_last: bool) -> str:
        """Text that is certain by now: a character may need several tokens."""
        if self.tokenizer is None:
            return ""
        text = completion.text
        if text.endswith("\ufffd") and not is_last:
            return ""
        return text[len(shown) :]


def _is_one_prompt(prompts: Any) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _as_module(model: str | Path | nn.Module, dtype: torch.dtype | None, device: torch.device) -> tuple[nn.Module, Any]:
    """(a module the runner runs, its tokenizer if one was found)."""
    if isinstance(model, nn.Module):
        module = model.to(device)
        if hasattr(module, "config") and hasattr(module, "base_model_prefix"):
            from attention.huggingface import PagedCausalLM

            return PagedCausalLM(module), None
        return module, None
    from attention.huggingface import load

    loaded = load(model, dtype=dtype, device=device)
    return loaded.model, loaded.tokenizer

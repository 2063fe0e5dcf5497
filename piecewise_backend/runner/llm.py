"""`LLM(model).generate(prompts)`: a model to text in two calls."""

from __future__ import annotations

import operator
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attention.specs import check_at_least
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
        vocab_size = getattr(hf_config, "vocab_size", None) if vocab_size is None else vocab_size
        if vocab_size is None:
            raise ValueError(f"{type(module).__name__} has no config.vocab_size; pass vocab_size=")
        check_at_least(1, vocab_size=vocab_size)
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
        self._lock = threading.RLock()
        """Held while the engine is touched."""
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
            with self._lock:
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
        """Token ids of a prompt. ValueError for text without a tokenizer, and for what is neither text nor integers."""
        if not isinstance(prompt, str):
            try:
                return [operator.index(t) for t in prompt]
            except TypeError as error:
                raise ValueError(f"a prompt is text or a sequence of token ids: {error}") from error
        if self.tokenizer is None:
            raise ValueError("a text prompt needs a tokenizer: pass tokenizer= to LLM, or give token ids")
        return self.tokenizer(prompt)["input_ids"]

    def _serve(self, request_ids: Iterable[str]) -> Iterator[NewToken]:
        """Step the engine until these requests are finished. Tokens of other requests wait for their own reader, so
        calls may overlap, also from several threads; leaving early aborts what is unfinished."""
        self.engine.rejoin()
        unfinished = set(request_ids)
        try:
            while unfinished:
                for request_id in list(unfinished):
                    while self._arrived[request_id]:
                        token = self._arrived[request_id].popleft()
                        if token.finish_reason is not None:
                            unfinished.discard(request_id)
                        yield token
                with self._lock:
                    if unfinished and not any(self._arrived[r] for r in unfinished):
                        for token in self.engine.step():
                            self._arrived.setdefault(token.request_id, deque()).append(token)
        finally:
            with self._lock:
                self._abort(unfinished)
                self.engine.drain()
                for request_id in request_ids:
                    self._arrived.pop(request_id, None)

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._arrived.pop(request_id, None)
            self.engine.abort(request_id)

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> tuple[list[Completion], dict[str, int]]:
        each = _as_prompts(prompts)
        given = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(each)
        if len(given) != len(each):
            raise ValueError(f"{len(each)} prompts need one SamplingParams, or one each; got {len(given)}")
        if wrong := [type(one).__name__ for one in given if not isinstance(one, SamplingParams)]:
            raise ValueError(f"params must be a SamplingParams, or one for each prompt; got {wrong[0]}")
        completions = [Completion(_tokenizer=self.tokenizer) for _ in each]
        index_of: dict[str, int] = {}
        for index, (prompt, one) in enumerate(zip(each, given, strict=True)):
            try:
                ids = self.encode(prompt)
                with self._lock:
                    request_id = self.engine.add(ids, one)
                    self._arrived[request_id] = deque()
                index_of[request_id] = index
            except ValueError as error:  # the others are served
                completions[index].finish_reason, completions[index].error = "refused", str(error)
                self.report.reasons.add(Reason(ReasonCode.REQUEST_REFUSED, f"prompt {index}", str(error)))
            except BaseException:
                with self._lock:
                    self._abort(index_of)
                raise
        return completions, index_of

    def _new_text(self, completion: Completion, shown: str, *, is_last: bool) -> str:
        """Text that is certain by now: a character may need several tokens."""
        if self.tokenizer is None:
            return ""
        text = completion.text
        if text.endswith("\ufffd") and not is_last:
            return ""
        return text[len(shown) :]


def _as_prompts(prompts: Any) -> list[Any]:
    """Each prompt of what may be one: text, or token ids of any integers (a list, an array, a tensor)."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts are text or token ids, or a sequence of these; got {type(prompts).__name__}"
            + ("; of a tokenizer's output give ['input_ids']" if isinstance(prompts, Mapping) else "")
        )
    each = list(prompts)
    return [each] if each and _is_token_id(each[0]) else each


def _is_token_id(value: Any) -> bool:
    """An integer, also NumPy's or an element of a tensor."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


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

"""transformers' own way to decode: a loop over a dynamic cache, or over a static one under `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.cudagraph_trees import reset_cudagraph_trees
from transformers import DynamicCache, StaticCache


class EagerLoop:
    """A greedy loop over a dynamic cache: `generate` without stopping criteria, which never waits for the device."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.decode = self.prefill_forward = model.forward
        self.cache: Any = None
        self.logits: Any = None

    def begin(self, num_reqs: int, max_len: int) -> None:
        """Get ready for batches of `num_reqs` requests of up to `max_len` tokens."""

    def forced_logits(self, prompts: torch.Tensor, num_prefill: int) -> torch.Tensor:
        """As `expected_logits`, by a prefill and one decode step for each token left."""
        self._fill(prompts[:, :num_prefill])
        rows = [self.logits.clone()]
        columns = prompts[:, num_prefill:].T.to(self.model.device)
        for column in columns:
            self.tokens = column[:, None].clone(memory_format=torch.contiguous_format)  # other strides compile anew
            self._advance()
            rows.append(self.logits.clone())
        return torch.stack(rows, dim=1)

    def prefill(self, prompts: torch.Tensor, new_tokens: int) -> None:
        """Compute `prompts` [num_reqs, T] on an empty cache, so that `step` can follow `new_tokens` times."""
        self._fill(prompts)
        self.tokens = self.logits.argmax(-1, keepdim=True)

    def step(self) -> int:
        """One token more for each request. Returns how many tokens that were."""
        self._advance()
        self.tokens = self.logits.argmax(-1, keepdim=True)
        return len(self.tokens)

    def prefill_step(self, prompts: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that computes `prompts` [num_reqs, T] once: logits [num_reqs, vocabulary]. Nothing is cached."""
        ids = prompts.to(self.model.device)

        @torch.no_grad()
        def run() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return self.prefill_forward(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]

        return run

    def finish(self) -> None:
        """Give the batch's memory back."""
        self.cache = self.logits = None

    def facts(self) -> dict[str, Any]:
        """What to record besides times."""
        return {}

    def _empty_cache(self) -> Any:
        return DynamicCache(config=self.model.config)

    @torch.no_grad()
    def _fill(self, prompts: torch.Tensor) -> None:
        self.cache = self._empty_cache()
        num_reqs, length = prompts.shape
        positions = torch.arange(length, device=self.model.device).expand(num_reqs, length)
        self.logits = self.model(
            input_ids=prompts.to(self.model.device),
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=1,
        ).logits[:, -1]
        self.positions = torch.full((num_reqs, 1), length, device=self.model.device)

    @torch.no_grad()
    def _advance(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        self.logits = self.decode(
            input_ids=self.tokens, position_ids=self.positions, past_key_values=self.cache, logits_to_keep=1
        ).logits[:, -1]
        self.positions += 1


class CompiledLoop(EagerLoop):
    """The same over a static cache, each batch size compiled for itself. Prompts are computed without compiling."""

    backend = "inductor"

    def __init__(self, model: Any, mode: str) -> None:
        super().__init__(model)
        self.mode = mode
        self.static_cache: StaticCache | None = None
        self.prefill_forward = self._compiled()

    def begin(self, num_reqs: int, max_len: int) -> None:
        self.finish()
        self.decode = self._compiled()
        self.static_cache = StaticCache(config=self.model.config, max_cache_len=max_len)

    def finish(self) -> None:
        """Graphs too: they hold memory."""
        super().finish()
        self.static_cache = None
        torch.compiler.reset()
        reset_cudagraph_trees()

    def _compiled(self) -> Any:
        return torch.compile(self.model.forward, backend=self.backend, mode=self.mode, dynamic=False)

    def _empty_cache(self) -> Any:
        """The batch's one cache, emptied: graphs know it by its address."""
        assert self.static_cache is not None, "call begin first"
        self.static_cache.reset()
        return self.static_cache

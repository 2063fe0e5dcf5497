"""A piece's inputs as text: memory, tensors that lie in it, and sizes that are read off them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from piecewise_backend.cudagraph.capture import Step
from piecewise_backend.cudagraph.rows import TokenDim, span


@dataclass(frozen=True, slots=True)
class Given:
    """One tensor that a piece is given."""

    name: str
    fake: torch.Tensor
    memory: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class Arguments:
    """A step's inputs: tensors become arguments, sizes are read off them."""

    def __init__(self, step: Step, dim: TokenDim, rows: int) -> None:
        memories: dict[int, int] = {}
        self.all: list[tuple[str, Any]] = []
        self.given: list[Given] = []
        for position, fake in enumerate(step.input_fakes):
            name = f"a{position}"
            self.all.append((name, fake if isinstance(fake, torch.Tensor) else dim.evaluate(fake, rows)))
            if isinstance(fake, torch.Tensor):
                memory = memories.setdefault(fake.untyped_storage()._cdata, len(memories))
                self.given.append(Given(name, fake, memory, *dim.layout(fake, rows)))
        self.symbols = dict(zip((n for n, _ in self.all), step.input_fakes, strict=True))
        self.dynamic = [(i, d) for i, tensor in enumerate(self.given) for d in dim.dims(tensor.fake)]

    def sizes(self) -> Iterator[tuple[str, str]]:
        """(name, expression) of what is no tensor."""
        for name, value in self.all:
            if not isinstance(value, torch.Tensor):
                yield name, self._read_off(self.symbols[name]) or repr(value)

    def _read_off(self, size: Any) -> str | None:
        if not isinstance(size, torch.SymInt):
            return None
        for tensor in self.given:
            for d, extent in enumerate(tensor.fake.shape):
                if isinstance(extent, torch.SymInt) and extent.node.expr == size.node.expr:
                    return f"{tensor.name}.shape[{d}]"
        return None

    def memories(self) -> Iterator[str]:
        for number in sorted({t.memory for t in self.given}):
            users = [t for t in self.given if t.memory == number]
            numel = max(t.offset + span(t.sizes, t.strides) for t in users)
            fake = users[0].fake
            yield f'    m{number} = make_memory({number}, {numel}, {fake.dtype}, "{fake.device}")'

    def tensors(self) -> Iterator[str]:
        for t in self.given:
            yield f"m{t.memory}.as_strided({t.sizes}, {t.strides}, {t.offset})"

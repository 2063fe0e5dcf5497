"""Cudagraph modes, and the frozen key of one captured variant."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from piecewise_backend.names import unknown_name


class CUDAGraphMode(enum.Enum):
    """What is recorded: (for uniform decode batches, for mixed batches)."""

    NONE = ("NONE", "NONE")
    PIECEWISE = ("PIECEWISE", "PIECEWISE")
    FULL = ("FULL", "FULL")
    FULL_DECODE_ONLY = ("FULL", "NONE")
    FULL_AND_PIECEWISE = ("FULL", "PIECEWISE")

    @classmethod
    def parse(cls, value: CUDAGraphMode | str) -> CUDAGraphMode:
        """A mode from its name, in any case. ValueError names the near ones."""
        if isinstance(value, cls):
            return value
        try:
            return cls[str(value).upper().replace("-", "_")]
        except KeyError:
            raise unknown_name("cudagraph mode", value, cls.__members__) from None

    @property
    def decode(self) -> CUDAGraphMode:
        """The mode of uniform decode batches: NONE, PIECEWISE or FULL."""
        return CUDAGraphMode[self.value[0]]

    @property
    def mixed(self) -> CUDAGraphMode:
        """The mode of every other batch: NONE, PIECEWISE or FULL."""
        return CUDAGraphMode[self.value[1]]

    @property
    def separates_decode(self) -> bool:
        """Whether decode batches have graphs of their own."""
        return self.decode is not self.mixed


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDescriptor:
    """Key of one captured variant; sizes are padded ones."""

    mode: CUDAGraphMode
    """NONE, PIECEWISE or FULL."""
    num_tokens: int
    num_reqs: int | None = None
    """Padded requests; None where no recorded operator depends on them."""
    uniform_query_len: int | None = None
    """Query length of every request in a uniform decode batch; None for mixed batches."""
    max_query_len: int | None = None
    """Upper bound of the query lengths; None where no recorded operator depends on it."""

    @property
    def kind(self) -> str:
        """ "decode" or "mixed": the kind of batch, as reports name it."""
        return "mixed" if self.uniform_query_len is None else "decode"

    def __str__(self) -> str:
        kind = "mixed" if self.uniform_query_len is None else f"decode x{self.uniform_query_len}"
        return f"{self.mode.name} {kind}, {self.num_tokens} tokens"

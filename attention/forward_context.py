"""What an attention operator must know beyond its tensors, for the duration of one forward pass.

An operator in a compiled graph can carry tensors, numbers and strings only; it finds its layer's implementation and
this step's metadata here, by the layer's name.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class ForwardContext:
    """The layers of a model and the metadata of the step being run."""

    impls: Mapping[str, Any]
    """Layer name to the implementation of its group."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Layer name to its group's metadata for this step."""
    num_tokens: int = 0
    """Tokens of this step, padding included."""
    num_tokens_across_dp: tuple[int, ...] | None = None
    """Padded tokens of every data-parallel rank; None without data parallelism."""


_current = threading.local()


def current_forward_context() -> ForwardContext | None:
    """The context of the forward pass running on this thread; None outside of one."""
    return getattr(_current, "context", None)


def get_forward_context() -> ForwardContext:
    """The context of the forward pass running on this thread. RuntimeError outside of one."""
    context = current_forward_context()
    if context is None:
        raise RuntimeError(
            "an mrv2 attention layer ran outside a forward context: it needs paged-cache metadata. Run the model "
            "through piecewise_backend.runner (LLM or ModelRunner), or wrap your own loop in set_forward_context(...)"
        )
    return context


@contextlib.contextmanager
def set_forward_context(context: ForwardContext | None) -> Iterator[ForwardContext | None]:
    """Make `context` current on this thread; nested calls restore the outer one."""
    outer = current_forward_context()
    _current.context = context
    try:
        yield context
    finally:
        _current.context = outer

"""Numbers, flags and strings that a model keeps as attributes: a trace takes them for constants, so a forward that
changes one is seen to do so only once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from piecewise_backend.reasons import Reason, ReasonCode

Plain = bool | int | float | str
_TYPES = (bool, int, float, str)


def plain_state(model: nn.Module) -> dict[str, Plain]:
    """By the dotted name of each attribute."""
    return {
        f"{module_name}.{name}".lstrip("."): value
        for module_name, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in _TYPES
    }


def fixed_state(before: Mapping[str, Plain], model: nn.Module) -> Iterator[Reason]:
    """A reason for each attribute that a traced call has changed since `before`."""
    after = plain_state(model)
    for name, value in before.items():
        if name in after and after[name] != value:
            yield Reason(
                ReasonCode.STATE_FIXED,
                f"attribute {name}",
                f"forward changed it from {value!r} to {after[name]!r} while it was traced; every step computes what "
                f"the traced one did, from {value!r}",
                "keep it in a buffer, and write to that in place",
            )

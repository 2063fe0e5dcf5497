"""Values on the command line that more than one subcommand reads."""

from __future__ import annotations

import argparse
from typing import Any

_DTYPES = ("float32", "float16", "bfloat16")


def sizes(text: str) -> list[int]:
    """ "1,2,4" to [1, 2, 4]."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected sizes such as 1,2,4,8, got {text!r}") from None


def dtype_named(name: str | None) -> Any:
    """torch's dtype of a name; None for None. ValueError for a name that is none of a model's."""
    import torch

    if name is None:
        return None
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r}; allowed: {', '.join(_DTYPES)}")
    return getattr(torch, name)

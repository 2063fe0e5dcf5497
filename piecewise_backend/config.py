"""What the user may set: frozen, validated, and the only reader of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from piecewise_backend.names import unknown_name

Compiler = Literal["inductor", "aot_eager", "eager"]
Recorder = Literal["auto", "cuda", "emulated", "none"]
Padding = Literal["leave", "zero", "minus_one", "repeat_last"]
OnFallback = Literal["report", "error"]

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")

# torch.compile's own mode names, so that a script written for Inductor runs unchanged. Values: cudagraph mode, Inductor
# options on top.
_TORCH_MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("FULL_AND_PIECEWISE", {}),
    "reduce-overhead": ("FULL_AND_PIECEWISE", {}),
    "max-autotune": ("FULL_AND_PIECEWISE", {"max_autotune": True, "coordinate_descent_tuning": True}),
    "max-autotune-no-cudagraphs": ("NONE", {"max_autotune": True, "coordinate_descent_tuning": True}),
}


def environment_cache_dir() -> Path:
    """MRV2_CACHE_DIR, else the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "mrv2"
    return Path(os.environ.get("MRV2_CACHE_DIR") or default).expanduser()


def environment_dump_dir() -> Path | None:
    """MRV2_DUMP: where to write what becomes of every model in this process; None where it is not set."""
    asked = os.environ.get("MRV2_DUMP")
    return Path(asked).expanduser() if asked else None


def environment_recorder() -> Recorder:
    """MRV2_RECORDER, else "auto"."""
    return cast(Recorder, os.environ.get("MRV2_RECORDER") or "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`torch.compile(model, backend="mrv2", options={...})`: each field is one key."""

    mode: str = "FULL_AND_PIECEWISE"
    """NONE, PIECEWISE, FULL, FULL_DECODE_ONLY or FULL_AND_PIECEWISE. Alone in a plain call, FULL means: nothing is
    recorded where an operator must break."""
    recorder: Recorder = field(default_factory=environment_recorder)
    """What records: "auto" (CUDA graphs on a CUDA device, else nothing), "cuda", "emulated" (any device), "none"."""
    compiler: Compiler = "inductor"
    """What compiles the pieces."""
    fast_pieces: bool = False
    """Have Inductor search longer for faster kernels, and overlap the start of each with the end of the one before
    (programmatic dependent launch, on GPUs and with torch versions that have it). `compiler_options` go on top."""
    merge_linears: bool = True
    """A runner's model only: make linear layers that read the same tensor one matrix product. Their weights become
    views of one tensor."""
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    """Inductor's own options, as in `torch.compile(options=...)`."""
    splitting_ops: tuple[Any, ...] = ()
    """Operators that break the graph, besides the registered ones: names ("my::op") or operators."""
    capture_sizes: tuple[int, ...] | None = None
    """Padded sizes of the dynamic dimension; None: 1, 2, 4, then steps of 8 to 256, of 16 to 512."""
    decode_capture_sizes: tuple[int, ...] | None = None
    """The same for uniform decode batches of a runner; None: as `capture_sizes`."""
    graph_memory_budget: int | None = None
    """Bytes that the graphs of a runner may take, estimated from a few of them; sizes that save the least padding are
    left out. None: no limit."""
    strict_minimum: bool = False
    """Let the weakest attention backend decide what is recorded for all of them, instead of group by group."""
    capture_after: int = 2
    """A size is captured when it is seen for the so-manieth time."""
    max_captures: int = 16
    """At most so many captured sizes in one compiled graph; the rest runs compiled."""
    max_padding_waste: float = 0.5
    """Largest share of padded rows; beyond it a size runs compiled."""
    padding: Padding | Mapping[str, Padding] = field(default_factory=dict)
    """What fills padded rows: one rule for all inputs, or one per input name ("leave" keeps what the rows held).
    By default floats are left and integers repeat the last real row."""
    poison: bool = True
    """Emulated recorder: fill memory that a real pool could have reused with rubbish."""
    cache: bool = True
    """Keep compiled pieces on disk."""
    cache_dir: Path = field(default_factory=environment_cache_dir)
    """Folder of the compiled pieces."""
    on_fallback: OnFallback = "report"
    """"error" raises `FallbackError` where the report would list a fallback."""

    def __post_init__(self) -> None:
        _check_choice("recorder", self.recorder, Recorder)
        _check_choice("compiler", self.compiler, Compiler)
        _check_choice("on_fallback", self.on_fallback, OnFallback)
        for name in ("poison", "cache", "strict_minimum", "merge_linears", "fast_pieces"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"option {name!r} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.compiler_options, Mapping):
            raise ValueError(f"option 'compiler_options' must be a dict, got {self.compiler_options!r}")
        for name in ("capture_sizes", "decode_capture_sizes"):
            for size in getattr(self, name) or ():
                if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                    raise ValueError(f"option {name!r} must hold positive integers, got {size!r}")
        for rule in self.padding.values() if isinstance(self.padding, Mapping) else (self.padding,):
            _check_choice("padding", rule, Padding)
        if self.mode not in MODES:
            raise unknown_name("mode", self.mode, (*MODES, *_TORCH_MODES))
        for name, least in (("capture_after", 1), ("max_captures", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"option {name!r} must be an integer of at least {least}, got {value!r}")
        budget = self.graph_memory_budget
        if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
            raise ValueError(f"option 'graph_memory_budget' must be a number of bytes or None, got {budget!r}")
        waste = self.max_padding_waste
        if not isinstance(waste, int | float) or not 0 <= waste <= 1:
            raise ValueError(f"option 'max_padding_waste' is a share from 0 to 1, got {waste!r}")


def parse_options(options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
    """Options from what `torch.compile` hands over. ValueError for an unknown key, naming the nearest."""
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"options must be a dict, got {options!r}")
    given = dict(options or {})
    allowed = [f.name for f in fields(Options)]
    for key in given:
        if key not in allowed:
            raise unknown_name("option", key, allowed)
    asked = given.pop("mode", None) or mode
    if asked is not None:
        asked = str(getattr(asked, "name", asked))
        name, inductor = _TORCH_MODES.get(asked, (asked.upper().replace("-", "_"), {}))
        given["mode"] = name
        if inductor:
            given["compiler_options"] = inductor | dict(given.get("compiler_options", {}))
        if name not in MODES:
            raise unknown_name("mode", asked, (*MODES, *_TORCH_MODES))
    if given.get("splitting_ops") is not None:
        ops = given["splitting_ops"]
        given["splitting_ops"] = tuple(ops) if isinstance(ops, list | tuple | set | frozenset) else (ops,)
    for name in ("capture_sizes", "decode_capture_sizes"):
        if (sizes := given.get(name)) is not None:
            given[name] = tuple(sizes) if isinstance(sizes, Iterable) else (sizes,)
    if given.get("cache_dir") is not None:
        given["cache_dir"] = Path(given["cache_dir"]).expanduser()
    return Options(**{key: value for key, value in given.items() if value is not None})


def _check_choice(name: str, value: object, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise unknown_name(f"value of option {name!r}:", value, allowed)

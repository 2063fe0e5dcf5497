"""Who is measured: names on the command line to things that run one model, one after another."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attention.huggingface import PagedCausalLM
from attention.registry import available_backends
from piecewise_backend.bench.contenders import MODES, Contender, Skipped, all_right
from piecewise_backend.bench.engine_loop import EngineLoop, EngineSettings
from piecewise_backend.bench.rounds import synchronize
from piecewise_backend.bench.transformers_loop import CompiledLoop, EagerLoop

PLAIN: dict[str, Callable[[Any], Any]] = {
    "eager": EagerLoop,
    "inductor": lambda model: CompiledLoop(model, "default"),
    "reduce-overhead": lambda model: CompiledLoop(model, "reduce-overhead"),
}
NAMES = (*PLAIN, *MODES, "vllm")

__all__ = ["MODES", "Contender", "Skipped", "all_right", "synchronize"]  # what scripts use of the package's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One contender: what was asked for and, for a mode of the engine, on which attention backend."""

    what: str
    backend: str | None = None

    def __str__(self) -> str:
        return self.what if self.backend is None else f"{self.what} {self.backend}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What every script that compares contenders asks for."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--contenders", nargs="+", choices=NAMES, default=["eager", "reduce-overhead", *MODES])
    parser.add_argument(
        "--backends",
        nargs="+",
        default=["triton", "flashinfer"] if on_gpu else ["torch"],
        help="attention backends, for each of which every mode is run",
    )
    parser.add_argument("--compiler", default="inductor", help="what compiles the engine's pieces")
    parser.add_argument("--options", type=json.loads, default={}, help="more of the engine's options, as JSON")


def names(contenders: Sequence[str], backends: Sequence[str]) -> list[Name]:
    """Every contender, transformers' own first: wrapping the model for the engine changes its attention for good."""
    plain = [Name(what=what) for what in NAMES if what in contenders and what not in MODES]
    return plain + [Name(what=m, backend=b) for b in backends for m in MODES if m in contenders]


def engine_options(arguments: argparse.Namespace, capture_sizes: Sequence[int] | None) -> dict[str, Any]:
    """Options of the engine: CUDA graphs on a GPU, emulated ones elsewhere."""
    recorder = "cuda" if torch.cuda.is_available() else "emulated"
    return {"recorder": recorder, "compiler": arguments.compiler, "capture_sizes": capture_sizes, **arguments.options}


class Workshop:
    """Makes contenders out of one model."""

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        self.model, self.settings = model, settings
        self._paged: PagedCausalLM | None = None

    def make(self, name: Name) -> Contender:
        """Skipped for what cannot run here."""
        if name.what == "vllm":
            raise Skipped(_why_no_vllm())
        if name.backend is None:
            assert self._paged is None, "the model's attention is replaced already"
            return PLAIN[name.what](self.model)
        if name.backend not in available_backends():
            raise Skipped(f"no attention backend {name.backend!r}; registered are {', '.join(available_backends())}")
        if self._paged is None:
            self._paged = PagedCausalLM(self.model)
        try:
            return EngineLoop(self._paged, name.what, name.backend, self.settings)
        except ImportError as error:
            raise Skipped(f"not importable here: {error}") from error


Measure = Callable[["Contender", dict[str, Any], Callable[[], None]], None]
"""(contender, the record to fill, what to call after each part of it)."""


def run_each(
    workshop: Workshop, wanted: Sequence[Name], measure: Measure, records: dict[str, Any], save: Callable[[], None]
) -> None:
    """Make and measure one contender after another into `records`, giving back the memory of each.

    One that raises is recorded as failed, beside what it had measured before. `save` is called whenever a record grew.
    """
    for name in wanted:
        record: dict[str, Any] = {}
        records[str(name)] = record
        started = time.perf_counter()
        print(f"-- {name}", flush=True)
        try:
            measure(workshop.make(name), record, save)
        except Skipped as why:
            record["skipped"] = str(why)
            print(f"skipped: {why}", flush=True)
        except Exception as error:  # the others are measured all the same
            traceback.print_exc(file=sys.stdout)
            record["error"] = f"{type(error).__name__}: {error}"
        record["wall_seconds"] = time.perf_counter() - started
        print(f"{record['wall_seconds']:.0f} s in all", flush=True)
        save()
        _give_memory_back()


def _give_memory_back() -> None:
    torch.compiler.reset()  # compiled code of a contender holds its caches
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _why_no_vllm() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "vllm is not importable here"
    return "vllm keeps weights of its own, whose output cannot be compared with this model's"

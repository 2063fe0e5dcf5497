"""Random models: one integer decides a model's source, its options and the calls made to it."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.fuzz import operators  # noqa: F401  (torch.ops.fuzz)
from tests.fuzz.templates import (
    BREAKS,
    CROSS_ROW,
    CROSS_ROW_OUTPUTS,
    IN_PLACE,
    ON_STATE,
    OUTPUTS,
    ROW_WISE,
    UNRECORDABLE,
    VIEWS,
)

D, ROWS, VOCAB, SLOTS = 8, 2, 16, 64  # features, rows of a fixed matrix, embeddings, cache slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the model."""

    size: int
    overlap: bool = False
    """x and y are views of one tensor."""
    move_cache: bool = False
    """The cache is a new tensor from this call on."""
    zeros: bool = False
    """All floats are 0 and all ids equal, as in a warm-up."""
    inference: bool = False
    """Under inference_mode rather than no_grad."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model and what is done to it."""

    seed: int
    inputs: tuple[str, ...]
    statements: tuple[str, ...]
    outputs: tuple[str, ...]
    options: dict[str, Any]
    marked: bool
    """The dynamic dimension is marked; else Dynamo finds it out at the second size."""
    calls: tuple[Call, ...]

    @property
    def source(self) -> str:
        body = "".join(f"    {s}\n" for s in self.statements)
        return f"def forward(self, {', '.join(self.inputs)}):\n{body}    return ({', '.join(self.outputs)},)\n"

    def describe(self) -> str:
        """What to put into a bug report."""
        calls = "\n".join(f"  {call}" for call in self.calls)
        return f"seed {self.seed}, marked={self.marked}, options={self.options}\n{self.source}calls:\n{calls}"


class Model(torch.nn.Module):
    """The state that every generated forward may use."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(spec.seed)

        def random_tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * 0.5

        for i in range(3):
            setattr(self, f"w{i}", torch.nn.Parameter(random_tensor(D, D), requires_grad=False))
            setattr(self, f"b{i}", torch.nn.Parameter(random_tensor(D), requires_grad=False))
        self.table = torch.nn.Parameter(random_tensor(VOCAB, D), requires_grad=False)
        self.register_buffer("total", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("memory", torch.zeros(SLOTS, D))
        self._run = _compile_source(spec)

    def forward(self, *args: Any) -> Any:
        return self._run(self, *args)


def _compile_source(spec: Spec) -> Callable[..., Any]:
    """The function of the generated source, with lines that tracebacks and reports can show."""
    name = f"<model {spec.seed} {abs(hash(spec.source)):x}>"
    linecache.cache[name] = (len(spec.source), None, spec.source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "F": F, "fuzz": torch.ops.fuzz}
    exec(compile(spec.source, name, "exec"), scope)
    return scope["forward"]


_OPTIONAL_INPUTS = {
    "y": 0.35, "ids": 0.4, "mask": 0.25, "slots": 0.3, "scale": 0.2, "step": 0.2, "row": 0.2, "cache": 0.4,
    "xt": 0.12, "x3": 0.12, "wide": 0.12, "n": 0.05,
}  # fmt: skip
_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", *["FULL_AND_PIECEWISE"] * 5, *["PIECEWISE"] * 2)


def random_spec(seed: int, *, compiler: str = "eager") -> Spec:
    """The model of `seed`."""
    rng = random.Random(seed)
    inputs = ("x", *(name for name, share in _OPTIONAL_INPUTS.items() if rng.random() < share))
    statements, outputs = _random_body(rng, inputs)
    options = _random_options(rng) | {"compiler": compiler}
    if compiler == "inductor":  # it drops a rounding to half precision and back, which eager does
        options["compiler_options"] = {"emulate_precision_casts": True}
    return Spec(
        seed=seed,
        inputs=inputs,
        statements=statements,
        outputs=outputs,
        options=options,
        marked=rng.random() < 0.5,
        calls=_random_calls(rng),
    )


def _random_body(rng: random.Random, inputs: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    kinds: list[tuple[list[str], float]] = [
        (ROW_WISE, 6), (VIEWS, 0.7), (IN_PLACE, 1.0), (ON_STATE, rng.choice([0, 1.0])),
        (CROSS_ROW, rng.choice([0, 0, 3.0])), (BREAKS, rng.choice([0, 1, 2.5])),
        (UNRECORDABLE, rng.choice([0, 0, 0, 0.3])),
    ]  # fmt: skip
    own = ["v"]  # values that may be written without writing to an input
    readable = ["v", "x"]
    statements = ["v = F.linear(x, self.w0, self.b0)" if rng.random() < 0.7 else "v = x * 1.0"]

    def usable(templates: list[str]) -> list[str]:
        bare = []
        for template in templates:
            needs, colon, statement = template.partition(": ")
            if colon and set(needs.split()) <= set(_OPTIONAL_INPUTS):
                if set(needs.split()) <= set(inputs):
                    bare.append(statement)
            else:
                bare.append(template)
        return bare

    for i in range(rng.randint(2, 10)):
        templates = usable(rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0])
        template = rng.choice(templates)
        writes_a = template in IN_PLACE or template in UNRECORDABLE
        names = {
            "new": f"v{i}", "q": f"q{i}", "k": rng.randrange(3), "b": rng.choice(readable),
            "a": rng.choice(own if writes_a else readable),
        }  # fmt: skip
        statements.append(template.format(**names))
        if "{new} = " in template or template.startswith("{new},"):
            readable.append(f"v{i}")
            if template not in VIEWS or names["a"] in own:
                own.append(f"v{i}")
    if rng.random() < 0.7:
        statements.append(f"out = F.layer_norm({readable[-1]}, (8,))")
        readable.append("out")
    choices = usable(OUTPUTS)
    if rng.random() < 0.1:
        choices += CROSS_ROW_OUTPUTS * 3
    outputs = [readable[-1]]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
        outputs.append(rng.choice(choices).format(a=rng.choice(readable), b=rng.choice(readable)))
    return tuple(statements), tuple(outputs)


def _random_options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"mode": rng.choice(_MODES), "capture_after": rng.choice([1, 1, 2])}
    if rng.random() < 0.7:
        options["capture_sizes"] = sorted(rng.sample(range(2, 25), rng.randint(2, 5)))
    if rng.random() < 0.2:
        options["max_captures"] = rng.randint(1, 3)
    options["max_padding_waste"] = rng.choice([0.0, 0.5, 0.9, 0.9, 1.0])
    if rng.random() < 0.2:
        options["padding"] = rng.choice(["zero", "repeat_last", "leave"])
    return options


def _random_calls(rng: random.Random) -> tuple[Call, ...]:
    kind = rng.random()
    if kind < 0.15:
        pool = [rng.randint(1, 24)]  # one size only
    elif kind < 0.3:
        pool = list(range(2, 14))  # growth
    else:
        pool = [rng.choice([1, 2, 3, 4, 5, 7, 8, 11, 16, 24]) for _ in range(rng.randint(2, 4))]
    sizes = pool if len(pool) > 6 else [rng.choice(pool) for _ in range(rng.randint(8, 14))]
    moves, overlaps, modes = rng.random() < 0.4, rng.random() < 0.15, rng.random() < 0.1
    zeros = rng.random() < 0.2
    return tuple(
        Call(
            size=size,
            overlap=overlaps and rng.random() < 0.4,
            move_cache=moves and rng.random() < 0.25,
            zeros=zeros and index < 2,
            inference=modes and rng.random() < 0.5,
        )
        for index, size in enumerate(sizes)
    )


class Arguments:
    """Makes the arguments of each call on `device`; `dynamic` names the dimension of each input that varies."""

    dynamic = {"x": 0, "y": 0, "ids": 0, "mask": 0, "slots": 0, "xt": 1, "x3": 1, "wide": 0}  # noqa: RUF012

    def __init__(self, spec: Spec, device: str = "cpu") -> None:
        self.spec, self.device = spec, device
        self.generator = torch.Generator().manual_seed(spec.seed + 1)
        self.kept = {"cache": self._randn(SLOTS, D), "row": self._randn(D), "scale": self._randn()}

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def make(self, call: Call) -> dict[str, Any]:
        s, g = call.size, self.generator
        base = self._randn(s + 1, D)
        given: dict[str, Any] = {
            "x": base[:s] if call.overlap else self._randn(s, D),
            "y": base[1:] if call.overlap else self._randn(s, D),
            "ids": torch.randint(0, VOCAB, (s,), generator=g).to(self.device),
            "mask": (torch.rand(s, generator=g) > 0.4).to(self.device),
            "slots": torch.randperm(SLOTS, generator=g)[:s].to(self.device),
            "step": torch.randint(0, 9, (), generator=g).to(self.device),
            "xt": self._randn(D, s),
            "x3": self._randn(2, s, D),
            "wide": self._randn(s, 1).expand(s, D),
            "n": int(torch.randint(2, 6, (), generator=g)),
        }
        if call.zeros:
            given |= {k: torch.zeros_like(given[k]) for k in ("x", "y", "ids", "mask", "xt", "x3")}
        if call.move_cache:
            self.kept["cache"] = self.kept["cache"].clone()
        given |= self.kept
        return {name: given[name] for name in self.spec.inputs}

    def mark(self, args: dict[str, Any]) -> None:
        """Tell Dynamo which dimension varies."""
        for name, dim in self.dynamic.items():
            if name in args and args[name].shape[dim] > 1:
                torch._dynamo.mark_dynamic(args[name], dim)


def smaller_specs(spec: Spec) -> list[Spec]:
    """Specs with one statement, output or call fewer."""

    def without(items: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        return [items[:i] + items[i + 1 :] for i in reversed(range(len(items)))]

    found = [replace(spec, statements=s) for s in without(spec.statements)]
    found += [replace(spec, calls=c) for c in without(spec.calls) if c]
    found += [replace(spec, outputs=o) for o in without(spec.outputs) if o]
    return found + [replace(spec, inputs=i) for i in without(spec.inputs) if "x" in i]

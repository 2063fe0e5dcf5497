"""Random models: one integer decides a model's source, its options and the calls made to it."""

from __future__ import annotations

import linecache
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from piecewise_backend.breakpoints import register_breakpoint

D, ROWS, VOCAB, SLOTS = 8, 2, 16, 64  # features, rows of a fixed matrix, embeddings, cache slots


# Operators at which graphs break, in every shape that a user's may have. All but `fuzz::masked_mean` and
# `fuzz::center` are row-wise, and those two see the real rows only.


def _custom_op(name: str, *, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"fuzz::{name}", mutates_args=mutates)


@_custom_op("fresh")
def fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


@fresh.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("pair")
def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, (x * y).sum(-1)


@pair.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


@_custom_op("write_out", mutates=("out",))
def write_out(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.tanh(x) - 1)


@write_out.register_fake
def _(x: torch.Tensor, out: torch.Tensor) -> None:
    return None


@_custom_op("rotate_", mutates=("x",))
def rotate_(x: torch.Tensor, angle: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    a, b = x[:, :half].clone(), x[:, half:].clone()
    x[:, :half] = a * angle.cos() - b * angle.sin()
    x[:, half:] = a * angle.sin() + b * angle.cos()


@rotate_.register_fake
def _(x: torch.Tensor, angle: torch.Tensor) -> None:
    return None


@_custom_op("recordable")
def recordable(x: torch.Tensor, count: int) -> torch.Tensor:
    return x * 0.5 + 1


@recordable.register_fake
def _(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("center")
def center(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@center.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@_custom_op("append_", mutates=("cache",))
def append_(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache[slots] = x
    return cache.mean(0)


@append_.register_fake
def _(x: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return cache.new_empty(cache.shape[1])


@_custom_op("plus_one")
def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@plus_one.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def register_breakpoints() -> None:
    """Make the operators above breakpoints; `fuzz::plus_one` stays an operator inside of a piece."""
    for op in (fresh, pair, write_out, center, append_):
        register_breakpoint(op)
    register_breakpoint(rotate_, capturable=True)
    register_breakpoint(recordable, capturable=True, owns_metadata=True)


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


# Statements: {new} is a fresh name, {a} and {b} are [s, D] floats at hand. What a template needs of the inputs stands
# in front.
_ROW_WISE = [
    "{new} = F.linear({a}, self.w{k}, self.b{k})",
    "{new} = F.linear({a}, self.w{k}, self.b{k})",
    "{new} = F.layer_norm({a}, (8,))",
    "{new} = F.gelu({a})",
    "{new} = {a} + {b}",
    "{new} = {a} * {b} * 0.1",
    "{new} = torch.softmax({a}, -1)",
    "{new} = {a} @ self.w{k}.t()",
    "{new} = ({a}.view(-1, 2, 4).transpose(1, 2) * 2).reshape(-1, 8)",
    "{new} = torch.cat({a}.chunk(2, -1)[::-1], -1)",
    "{new} = {a}[:, None, :].expand(-1, 3, -1).sum(1)",
    "{new} = {a}.t().contiguous().t() * 1.5",
    "{new} = {a}.flip(-1)",
    "{new} = fuzz.plus_one({a})",
    "{new} = ({a} > 0.1).to(torch.bfloat16) * {b}",
    "{new} = {a}.half().exp().float()",
    "{new} = {a} - {a}.amax(-1, keepdim=True)",
    "{new} = {a} + torch.arange({a}.shape[0], device=x.device)[:, None] * 0.1",
    "{new} = {a} + self.memory[:8].t()[0]",
    "{new} = torch.where({a} > 0, {b}, {a})",
    "{new} = {a}.masked_fill({b} > 1, 0.5)",
    "{new} = {a} + torch.zeros_like({b})",
    "{new} = {a} + {a}.argmax(-1)[:, None]",
    "{new} = {a} + torch.tensor([1.0, 2.0], device=x.device)[0]",
    "ids: {new} = {a} + F.embedding(ids, self.table)",
    "ids: {new} = {a} * (ids % 3)[:, None]",
    "mask: {new} = torch.where(mask[:, None], {a}, {b})",
    "mask: {new} = {a}.masked_fill(~mask[:, None], 0.0)",
    "scale: {new} = {a} * scale",
    "step: {new} = {a} + step",
    "row: {new} = {a} * row",
    "row: {new} = {a} + row.view(2, 4).t().reshape(8)",
    "xt: {new} = {a} + xt.t()",
    "xt: {new} = xt.t() * 2",
    "x3: {new} = {a} + x3[1]",
    "x3: {new} = x3.sum(0) + {a}",
    "y: {new} = {a} + y",
    "wide: {new} = {a} + wide",
    "cache: {new} = {a} + cache[0]",
    "cache ids: {new} = {a} + cache[ids]",
]
_VIEWS = [
    "{new} = {a}.view(-1, 8)",
    "{new} = {a}.t().t()",
    "{new} = {a}[:, :]",
    "{new} = {a}.view(-1, 2, 4).view(-1, 8)",
]
_IN_PLACE = [
    "{a}.add_(0.5)",
    "{a}.mul_(self.b{k})",
    "{a}[:, :4] = {b}[:, 4:]",
    "{a}[:, 1:3].mul_(2)",
    "{a}.view(-1, 2, 4)[:, 0].add_(1.0)",
    "{a}.t()[2].add_(0.25)",
    "{a}.clamp_(-3, 3)",
    "{a}.copy_({b} * 0.5)",
    "fuzz.rotate_({a}, self.b{k}[0])",
    "torch.relu_({a})",
]
_ON_STATE = [
    "self.total.add_(0.25)",
    "self.total.mul_(0.5).add_(self.b{k})",
    "self.count += 1",
    "self.memory[3:5, :4].add_(1)",
    "self.memory.view(-1)[:8].copy_(self.b{k})",
    "cache: cache.add_(0.125)",
    "cache: cache[1:3] = self.w{k}[:2]",
    "cache: cache.view(-1)[5:9].mul_(0.5)",
    "cache: cache.t()[0].add_(self.count)",
    "row: row.add_(1.0)",
    "scale: scale.add_(0.5)",
    "cache slots: cache[slots] = {a}",
    "cache slots: cache.index_copy_(0, slots, {a})",
    "slots: self.memory[slots] = {a} * 0.5",
    "cache slots: {new}_mean = fuzz.append_({a}, slots, cache); {new} = {a} + {new}_mean",
    "x.add_(1.0)",
    "y: y.mul_(0.5)",
    "x3: x3[0].add_(1.0)",
]
_CROSS_ROW = [
    "{new} = torch.cumsum({a}, 0) * 0.1",
    "{new} = {a} - {a}.mean(0)",
    "{new} = torch.roll({a}, 1, 0)",
    "{new} = {a}.flip(0)",
    "{new} = torch.sort({a}, 0)[0]",
    "{new} = {a} * {a}.shape[0] * 0.1",
    "{new} = {a} + {a}[-1]",
    "{new} = {a} + {a}[{a}.shape[0] // 2]",
    "{new} = torch.where({a}.max() > 0, {b}, -{a})",
    "{new} = torch.where({a}[0, 0] > 0, {a}, {a}.flip(0))",
    "{new} = {a} / (1 + {a}.norm())",
    "{new} = torch.stack([{a}, {a}.flip(0)]).amax(0)",
    "{new} = torch.cat([{a}[1:], {a}[:1]])",
    "{new} = torch.softmax({a}, 0)",
    "{new} = {a} + ({a} > 5).any()",
    "{new} = ({a} @ {a}.t()).softmax(-1) @ {a}",
    "{new} = torch.cat([{a}[{a}.shape[0] // 2 :], {a}[: {a}.shape[0] // 2]])",
    "self.total.copy_({a}.mean(0))",
    "self.total.add_({a}.sum(0) * 0.01)",
    "ids: {new} = {a} * ids.max()",
    "ids: {new} = {a} + ids.sum() * 0.01",
    "ids: {new} = {a}[ids % {a}.shape[0]]",
    "slots: self.memory.index_add_(0, slots, {a})",
    "mask: {new} = {a} + mask.sum()",
    "mask: {new} = {a} * mask.any()",
    "n: {new} = {a} * n",
]
_BREAKS = [
    "{new} = fuzz.fresh({a})",
    "{new}, {new}_sum = fuzz.pair({a}, {b}); {new} = {new} + {new}_sum[:, None]",
    "{new}, _ = fuzz.pair({a}, {b})",
    "_, {new}_sum = fuzz.pair({a}, {b}); {new} = {a} * {new}_sum.view(-1, 1)",
    "{new} = torch.empty_like({a}); fuzz.write_out({a}, {new})",
    "{new} = torch.empty({a}.shape[0], 16, device=x.device)[:, 4:12]; fuzz.write_out({a}, {new})",
    "{new} = fuzz.recordable({a}, {a}.shape[0])",
    "{new} = fuzz.center({a})",
    "{q} = {a}.view(1, -1, 2, 4).transpose(1, 2); "
    "{new} = F.scaled_dot_product_attention({q}, {q}, {q}).transpose(1, 2).reshape(-1, 8)",
    "{q} = {a}.view(1, -1, 2, 4).transpose(1, 2); "
    "{new} = F.scaled_dot_product_attention({q}, {q} * 2, {q}, is_causal=True).transpose(1, 2).reshape(-1, 8)",
]
_UNRECORDABLE = [
    "{a}[{b} > 2] = 0.0",
    "{new} = {a} * 1.0; {new}[{b} > 0] = {new}[0, 0]",
]
_OUTPUTS = [
    "{a}", "{a}", "{a}", "{a} + 1", "{a}.t()", "{a}[:, :4]", "{a}.view(-1)", "{a}.shape[0]", "{a}.shape[0] * 2 + 1",
    "{a}[0]", "{a}.sum(-1)", "{a}[:, None].expand(-1, 3, 8)", "{a} > 0", "x", "x.t()", "x[:, 2:4]", "x.view(-1)",
    "self.total", "self.memory[:2]", "self.w0.t()", "None", "3", "{a}.half()", "{a}.argmax(-1)",
    "{a}.unbind(-1)[1]", "torch.zeros(3, device=x.device)", "self.count + 1", "[{a}, {b}]", "{{'k': {a}}}",
    "cache: cache", "cache: cache[1:3].t()", "y: y[:, :2]", "row: row + 1", "row: row", "scale: scale * 2",
    "xt: xt[1]", "x3: x3[0]", "ids: ids", "ids: ids + 1", "step: step + 1", "wide: wide",
]  # fmt: skip
_CROSS_ROW_OUTPUTS = ["{a}.sum(0)", "{a}[-1]", "{a}[1:]", "{a}.mean()", "{a}.flip(0)[:2]"]

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
        (_ROW_WISE, 6), (_VIEWS, 0.7), (_IN_PLACE, 1.0), (_ON_STATE, rng.choice([0, 1.0])),
        (_CROSS_ROW, rng.choice([0, 0, 3.0])), (_BREAKS, rng.choice([0, 1, 2.5])),
        (_UNRECORDABLE, rng.choice([0, 0, 0, 0.3])),
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
        writes_a = template in _IN_PLACE or template in _UNRECORDABLE
        names = {
            "new": f"v{i}", "q": f"q{i}", "k": rng.randrange(3), "b": rng.choice(readable),
            "a": rng.choice(own if writes_a else readable),
        }  # fmt: skip
        statements.append(template.format(**names))
        if "{new} = " in template or template.startswith("{new},"):
            readable.append(f"v{i}")
            if template not in _VIEWS or names["a"] in own:
                own.append(f"v{i}")
    if rng.random() < 0.7:
        statements.append(f"out = F.layer_norm({readable[-1]}, (8,))")
        readable.append("out")
    choices = usable(_OUTPUTS)
    if rng.random() < 0.1:
        choices += _CROSS_ROW_OUTPUTS * 3
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

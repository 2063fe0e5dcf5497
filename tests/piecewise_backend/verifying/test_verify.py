"""`verify`: bugs are found and named, and nothing else is."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import dropout, gelu

import piecewise_backend
from piecewise_backend.compile import CompiledPiece, PieceCompiler
from piecewise_backend.runner import LLM
from piecewise_backend.verifying.result import Fault, Verification, VerificationError
from tests.hybrid import HybridDecoder, all_caches, make_hybrid_runner
from tests.piecewise_backend.operators import triple
from tests.piecewise_backend.verifying import planted
from tests.tiny import VOCAB, TinyDecoder, make_runner, work

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@pytest.fixture(autouse=True)
def nothing_planted() -> Iterator[None]:
    planted.forget()
    piecewise_backend.reset()
    yield
    planted.forget()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    given = {"recorder": "emulated", "compiler": "eager", "capture_after": 1, "cache": False, **options}
    return torch.compile(function, backend="mrv2", options=given)


def called(function: Callable[..., Any], rows: int = 4) -> tuple[torch.Tensor]:
    """Call a compiled function so that it captures, and make another input of as many rows."""
    x = torch.randn(rows, 32)
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        function(x)
    again = torch.randn(rows, 32)
    torch._dynamo.mark_dynamic(again, 0)
    return (again,)


def test_a_right_model_agrees_with_eager_at_every_captured_size() -> None:
    function = compiled(lambda x: triple(gelu(x) @ x.T @ x).relu(), splitting_ops=["probe::triple"])
    for rows in (4, 8):
        inputs = called(function, rows)
    result = piecewise_backend.verify(function, inputs)
    assert result.ok, result
    assert [checked.replayed for checked in result.checked] == [True, True]
    assert "agrees with eager" in str(result)
    result.raise_if_wrong()


def test_an_operator_that_is_wrong_only_when_replayed_is_named_with_its_line() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        hidden = gelu(x + 1)
        doubled = planted.remember(hidden)  # the line to be named
        return doubled.sin()

    function = compiled(model)
    result = piecewise_backend.verify(function, called(function))
    (found,) = result.differences
    assert found.fault is Fault.REPLAY
    assert found.op == "planted::remember"
    assert "# the line to be named" in found.line
    assert "test_verify.py" in found.line
    assert found.max_abs > found.tolerance > 0
    with pytest.raises(VerificationError, match="planted::remember"):
        result.raise_if_wrong()


def test_an_operator_that_breaks_graphs_and_is_wrong_only_in_them_is_named_too() -> None:
    piecewise_backend.register_breakpoint(planted.remember, capturable=True, owns_metadata=True)
    try:
        function = compiled(lambda x: planted.remember(gelu(x + 1)).sin())
        (found,) = piecewise_backend.verify(function, called(function)).differences
    finally:
        piecewise_backend.unregister_breakpoint(planted.remember)
    assert (found.fault, found.op) == (Fault.REPLAY, "planted::remember")
    assert found.step.startswith("planted::remember")


def test_a_recording_with_a_host_number_that_has_changed_since_is_stale() -> None:
    function = compiled(lambda x: planted.scale(gelu(x + 1)).sin())
    planted.Host.is_recording = True
    inputs = called(function)
    planted.Host.is_recording = False
    assert piecewise_backend.verify(function, inputs).ok
    planted.Host.scale = 3.0
    (found,) = piecewise_backend.verify(function, inputs).differences
    assert (found.fault, found.op) == (Fault.REPLAY, "planted::scale")
    assert "changed since" in found.detail
    assert "planted.scale(gelu(x + 1))" in found.line


def break_the_compiler(monkeypatch: pytest.MonkeyPatch, only: str) -> None:
    """Pieces that call `only` come out of the compiler a little wrong."""
    compile_right = PieceCompiler._compile

    def compile_wrong(self: PieceCompiler, module: torch.fx.GraphModule, *rest: Any) -> CompiledPiece:
        piece = compile_right(self, module, *rest)
        if only not in module.code:
            return piece
        return dataclasses.replace(piece, run=lambda *args: tuple(r * 1.01 for r in piece.run(*args)))

    monkeypatch.setattr(PieceCompiler, "_compile", compile_wrong)


def test_a_piece_that_was_compiled_wrongly_is_the_compilers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_compiler(monkeypatch, "softmax")
    model = lambda x: triple(gelu(x)).softmax(-1)  # noqa: E731
    function = compiled(model, compiler="aot_eager", splitting_ops=["probe::triple"])
    result = piecewise_backend.verify(function, called(function))
    (found,) = result.differences
    assert (found.fault, found.step) == (Fault.COMPILER, "piece 2")
    assert "softmax" in found.op
    assert "softmax(-1)" in found.line
    assert result.checked[0].compiled == 2


def test_what_inductor_makes_of_a_right_model_is_right() -> None:
    function = compiled(lambda x: triple(gelu(x)).softmax(-1), compiler="inductor", splitting_ops=["probe::triple"])
    result = piecewise_backend.verify(function, called(function))
    assert result.ok, result
    assert result.checked[0].compiled == 2


@pytest.mark.parametrize("counts", [True, False])
def test_verifying_leaves_a_model_as_it_was(counts: bool) -> None:
    model = planted.Counter(counts=counts)
    function = compiled(model)
    x = torch.randn(4, 32)
    with torch.no_grad():
        for _ in range(2):
            function(x)
    total, calls, random = model.total.clone(), model.calls, torch.get_rng_state()
    given, address = x.clone(), model.total.data_ptr()
    result = piecewise_backend.verify(function, (x,))
    assert result.ok, result
    assert result.checked[0].replayed is not counts  # a count that changes is another graph each time
    torch.testing.assert_close(model.total, total, rtol=0, atol=0)
    torch.testing.assert_close(x, given, rtol=0, atol=0)
    assert (model.calls, model.total.data_ptr()) == (calls, address)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_model_that_draws_random_numbers_is_said_to_and_is_not_called_wrong() -> None:
    function = compiled(lambda x: dropout(gelu(x), 0.5, training=True), compiler="aot_eager")
    result = piecewise_backend.verify(function, called(function))
    assert result.ok
    assert any("draws random numbers" in note for note in result.notes)
    assert "not compared" in str(result)


def test_graphs_that_are_not_the_models_are_the_tracers_fault() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.compiler.is_compiling() else x + 2

    function = compiled(model)
    (found,) = piecewise_backend.verify(function, called(function)).differences
    assert found.fault is Fault.TRACING


def test_a_model_that_fails_only_when_compiled_is_reported_and_not_raised() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x @ (x if torch.compiler.is_compiling() else x.T)

    result = piecewise_backend.verify(compiled(model), (torch.randn(2, 3),))
    assert not result.ok
    assert result.differences[0].fault is Fault.ERROR


def test_what_cannot_be_verified_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    for inputs in ((torch.randn(2, 3),), (torch.randn(2, 2), torch.randn(2, 2)), (None,)):
        with pytest.raises(ValueError, match=r"the model itself fails on these inputs.*a tuple of its arguments"):
            piecewise_backend.verify(compiled(model), inputs)
    with pytest.raises(TypeError, match="list of ScheduledRequest, or None; got list"):
        piecewise_backend.verify(make_runner("NONE"), [[1, 2]])
    with pytest.raises(TypeError, match="allowed"):
        piecewise_backend.verify(model, (torch.randn(2, 2),))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [make_runner, make_hybrid_runner])
def test_no_runner_in_any_mode_is_called_wrong_and_its_caches_stay(make: Callable[..., Any], mode: str) -> None:
    runner = make(mode)
    for cache in all_caches(runner).values():
        cache.copy_(torch.randn_like(cache))
    before = {name: cache.clone() for name, cache in all_caches(runner).items()}
    result = piecewise_backend.verify(runner)
    assert result.ok, result
    assert sum(checked.replayed for checked in result.checked) == len(runner.manager.captured)
    for name, cache in all_caches(runner).items():
        torch.testing.assert_close(cache, before[name], rtol=0, atol=0)


def test_the_operator_that_is_wrong_in_a_runners_graphs_is_named() -> None:
    runner = make_runner("FULL_AND_PIECEWISE", model=planted.DecoderThatRemembers(), capture_sizes=[4])
    result = piecewise_backend.verify(runner)
    assert {(d.fault, d.op) for d in result.differences} == {(Fault.REPLAY, "planted::remember")}
    assert all("remember(self.embed(input_ids) + 1)" in d.line for d in result.differences)


def test_a_runners_wrong_piece_is_the_compilers_fault_at_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    break_the_compiler(monkeypatch, "silu")
    result: Verification = piecewise_backend.verify(make_runner(compiler="aot_eager", capture_sizes=[4]))
    assert {d.fault for d in result.differences} == {Fault.COMPILER}
    assert {d.step for d in result.differences} == {"piece 2"}
    assert len(result.differences) == len(result.checked)


def test_a_batch_of_the_users_own_is_verified() -> None:
    runner = make_hybrid_runner("FULL_AND_PIECEWISE")
    requests = [work("a", [5, 6, 7], 0, [0], state_slot=0), work("b", [1], 0, [1], state_slot=1)]
    result = piecewise_backend.verify(runner, requests)
    assert result.ok, result
    assert [checked.replayed for checked in result.checked] == [True]
    assert isinstance(runner.model, HybridDecoder)


def test_a_program_that_was_read_from_disk_has_its_replays_compared_and_says_what_is_not(artifact_dir: Path) -> None:
    def start() -> LLM:
        limits = {"max_num_tokens": 8, "max_num_reqs": 4, "max_model_len": 32}
        options = {"recorder": "emulated", "capture_sizes": [2]}
        return LLM(TinyDecoder(1), vocab_size=VOCAB, device="cpu", options=options, **limits)

    cold = piecewise_backend.verify(start())
    assert (cold.ok, cold.notes) == (True, ())
    assert all(checked.compiled > 0 for checked in cold.checked)
    piecewise_backend.reset()
    warm = piecewise_backend.verify(start())
    assert warm.ok, warm
    assert all(checked.replayed for checked in warm.checked)
    assert any("read from disk" in note for note in warm.notes)


def test_memory_that_nothing_writes_is_not_compared() -> None:
    function = compiled(lambda x: (gelu(x), torch.empty_like(x)))
    result = piecewise_backend.verify(function, called(function))
    assert result.ok, result
    assert result.checked[0].replayed

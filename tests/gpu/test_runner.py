"""The runner on real CUDA graphs, against a dense computation without cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from piecewise_backend.reasons import ReasonCode
from piecewise_backend.runner import Engine, products_ahead
from tests.piecewise_backend.runner.test_autocast import AutocastDecoder
from tests.piecewise_backend.runner.test_autocast import check as check_autocast
from tests.tiny import VOCAB, TinyDecoder, make_runner, oracle_logits, serve_at_random, work

pytestmark = pytest.mark.gpu
MODES = ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"]


def make_cuda_runner(mode: str, model: TinyDecoder, **settings: object):
    return make_runner(mode, model=model, device="cuda", recorder="cuda", compiler="inductor", **settings)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", MODES)
def test_prefill_chunks_and_decode_mixed_in_one_step_give_the_dense_logits(mode: str, backend: str) -> None:
    model = TinyDecoder()
    runner = make_cuda_runner(mode, model, attention_backend=backend)
    assert runner.report.mode_resolved == mode
    first, second, third = [1, 2, 3, 4, 5, 6, 7], [50, 51], list(range(20))
    runner.execute([work("a", first[:5], 0, [3, 1])])
    logits = runner.execute([work("a", first[5:], 5, [3, 1]), work("b", second, 0, [7]), work("c", third, 0, [0, 9])])
    expected = torch.stack([oracle_logits(model, t)[-1] for t in (first, second, third)])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_logits_of_a_model_under_autocast(mode: str, backend: str) -> None:
    model = AutocastDecoder()
    runner = make_runner(
        mode, model=model, device="cuda", recorder="cuda", compiler="inductor", attention_backend=backend
    )
    check_autocast(runner, model)


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_come_and_go_at_random_get_the_tokens_they_get_alone(mode: str) -> None:
    model = TinyDecoder()
    engine = Engine(make_cuda_runner(mode, model, num_blocks=10), vocab_size=VOCAB)
    serve_at_random(engine, model)
    assert (engine.runner.report.num_replays > 0) == (mode != "NONE")
    assert ReasonCode.CAPTURE_FAILED not in engine.runner.report.reasons.codes()


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_no_kernel_of_attention_is_compiled_after_the_start(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    runner = make_cuda_runner(mode, TinyDecoder(), attention_backend="triton", max_num_tokens=64)
    compiled: list[str] = []
    hook = lambda fn, **_: compiled.append(fn.name)  # noqa: E731
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    for length in (1, 2, 5, 17, 40, 60):
        runner.execute([work("a", list(range(length)), 0, list(range(8)))])
        runner.execute([work("a", [3], length, list(range(8)))])
    assert not compiled


@pytest.mark.alone
def test_the_report_gives_time_and_memory_of_every_size() -> None:
    report = make_cuda_runner("FULL_AND_PIECEWISE", TinyDecoder()).report
    assert report.num_captures > 6
    assert all(size.seconds > 0 for size in report.sizes)
    assert sum(size.memory_bytes for size in report.sizes) > 0
    assert all(size.memory_bytes >= 0 for size in report.sizes)


@pytest.mark.alone
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_the_memory_of_all_graphs_is_estimated_from_a_few(mode: str) -> None:
    """R19."""
    report = make_cuda_runner(mode, TinyDecoder(num_layers=8), max_num_tokens=512, max_num_reqs=256).report
    measured = sum(size.memory_bytes for size in report.sizes)
    assert abs(report.estimated_graph_bytes - measured) <= 0.2 * measured + (64 << 20)


def test_a_second_start_makes_the_products_that_the_first_noted_and_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    made: list[int] = []
    original = products_ahead.make_products

    def count(numbers: dict[Any, torch.Tensor], out: torch.Tensor) -> None:
        original(numbers, out)
        made.append(len(numbers))

    monkeypatch.setattr(products_ahead, "make_products", count)
    logits = []
    for starts_before in range(2):
        model, settings = TinyDecoder().half(), {"cache": True, "cache_dir": str(tmp_path)}
        runner = make_cuda_runner("FULL_AND_PIECEWISE", model, max_num_tokens=64, **settings)
        assert len(made) == starts_before
        logits.append(runner.execute([work("a", list(range(40)), 0, [0, 3, 1])]).clone())
    assert made[0] > 4
    assert torch.equal(*logits)
    assert not [w for w in recwarn if "context" in str(w.message)]

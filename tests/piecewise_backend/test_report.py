import pytest
import torch

from piecewise_backend.backend import mrv2
from piecewise_backend.reasons import FallbackError, Reason, ReasonCode, Reasons
from piecewise_backend.reporting.records import SizeReport
from piecewise_backend.reporting.report import Report
from tests.piecewise_backend.operators import triple
from tests.tiny import TinyDecoder, make_runner


def report_of(calls=3, **options):
    found = []

    def backend(gm, examples):
        found.append(mrv2(gm, examples, options={"splitting_ops": ("probe::triple",), "compiler": "eager", **options}))
        return found[0]

    def model(x):
        for _ in range(3):
            x = triple(x) + 1
        return x

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(calls):
            compiled(torch.ones(2))
    return found[0].report


def test_it_counts_pieces_breakpoints_compiles_and_runs():
    report = report_of(calls=3)
    assert (report.num_pieces, report.num_breakpoints, len(report.compiled)) == (3, 3, 1)
    assert (report.uncaptured_runs, report.num_captures, report.num_replays) == (3, 0, 0)
    assert report.mode_resolved == "NONE"


def test_it_counts_captures_and_replays():
    report = report_of(calls=5, recorder="emulated")
    assert report.recorder == "emulated"
    assert report.num_captures == 1
    assert report.uncaptured_runs + report.num_captures + report.num_replays == 5


def test_it_reads_well():
    report = Report(
        name="model.py:7, in forward",
        mode_requested="FULL",
        mode_resolved="PIECEWISE",
        recorder="emulated",
        num_pieces=13,
        num_breakpoints=12,
        compiled={"a": "inductor", "b": "disk", "c": "disk"},
        compile_seconds=1.5,
        capture_sizes=(1, 2, 4),
        uncaptured_runs=2,
    )
    size = SizeReport(
        descriptor="PIECEWISE, 4 rows", num_tokens=4, num_graphs=13, seconds=0.25, memory_bytes=2**20, eager_ops=("op",)
    )
    size.replays, size.padded_rows = 2, 2
    report.sizes.append(size)
    reason = Reason(ReasonCode.CROSS_ROW, "padding", "list[int] of [red] differs", "a way out")
    report.reasons.add(reason)
    report.reasons.add(reason)
    text = str(report)
    for expected in (
        "mrv2 report: model.py:7, in forward",
        "FULL -> PIECEWISE (recorder: emulated)",
        "13 pieces, 12 breakpoints",
        "3 (2 disk, 1 inductor) in 1.50 s",
        "1, 2, 4",
        "1 in 0.25 s, 1.0 MiB",
        "2, besides 2 runs without graphs",
        "25%",
        "cross_row",
        "list[int] of [red] differs",
        "a way out",
    ):
        assert expected in text, expected
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 140


def test_the_program_is_printed_folded_with_a_word_and_a_shape_for_each_fate():
    lines = str(make_runner(model=TinyDecoder(num_layers=4)).report).splitlines()
    (attention,) = (line for line in lines if "x 3" in line and "mrv2::attention" in line)
    assert attention.split()[:5] == ["1,", "3,", "5", "x", "3"]
    assert "● recorded ○ eager" in attention
    assert "mode PIECEWISE runs attention between graphs" in attention


def test_fallbacks_are_errors_where_the_user_wants_that():
    reasons = Reasons(on_fallback="error")
    reasons.add(Reason(ReasonCode.NOT_SEEN_TWICE, "new sizes", "ran compiled"))
    with pytest.raises(FallbackError, match=r"\[cross_row\] padding: differs \(hint\)"):
        reasons.add(Reason(ReasonCode.CROSS_ROW, "padding", "differs", "hint"))

"""Findings of a report's reasons."""

from types import SimpleNamespace

from piecewise_backend.dry_run.findings import of_reasons
from piecewise_backend.reasons import Reason, ReasonCode


def test_a_choice_is_no_finding_and_a_loss_is_one() -> None:
    chosen = Reason(ReasonCode.BACKEND_CHOSEN, "attention backend 'x'", "passed over")
    lost = Reason(ReasonCode.CAPTURE_FAILED, "8 rows", "out of luck", "try again")
    (finding,) = of_reasons([chosen, lost], SimpleNamespace(steps=()))
    assert (finding.code, finding.op, finding.why, finding.hint) == (lost.code, "8 rows", "out of luck", "try again")

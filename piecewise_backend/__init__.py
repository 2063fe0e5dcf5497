"""mrv2: graph in, replayable program out. `torch.compile(model, backend="mrv2")` needs no import of this package."""

from piecewise_backend.backend import mrv2, reports, reset
from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.dry_run import Explanation, explain
from piecewise_backend.dumping.dump import dump
from piecewise_backend.lookup import report
from piecewise_backend.reasons import FallbackError, Reason, ReasonCode
from piecewise_backend.reporting.report import Report
from piecewise_backend.repro.script import write_repro
from piecewise_backend.verifying.api import verify
from piecewise_backend.verifying.result import Verification, VerificationError

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "Explanation",
    "FallbackError",
    "Options",
    "Reason",
    "ReasonCode",
    "Report",
    "Verification",
    "VerificationError",
    "dump",
    "explain",
    "mrv2",
    "register_breakpoint",
    "report",
    "reports",
    "reset",
    "unregister_breakpoint",
    "verify",
    "write_repro",
]

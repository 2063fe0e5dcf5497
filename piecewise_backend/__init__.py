"""mrv2: graph in, replayable program out. `torch.compile(model, backend="mrv2")` needs no import of this package."""

from piecewise_backend.backend import mrv2, reports, reset
from piecewise_backend.breakpoints import register_breakpoint, unregister_breakpoint
from piecewise_backend.config import Options
from piecewise_backend.cudagraph.modes import BatchDescriptor, CUDAGraphMode
from piecewise_backend.reasons import FallbackError, Reason, ReasonCode
from piecewise_backend.report import Report

__all__ = [
    "BatchDescriptor",
    "CUDAGraphMode",
    "FallbackError",
    "Options",
    "Reason",
    "ReasonCode",
    "Report",
    "mrv2",
    "register_breakpoint",
    "reports",
    "reset",
    "unregister_breakpoint",
]

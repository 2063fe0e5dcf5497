"""Results with their conditions: what ran, on what, when."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def conditions() -> dict[str, Any]:
    """Machine, versions, command and date of this run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "transformers", "flashinfer"):
        if (module := _import(name)) is not None:
            versions[name] = getattr(module, "__version__", "unknown")
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "gpu": gpu,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} torch threads",
        "versions": versions,
        "commit": _commit(),
    }


def write(name: str, results: dict[str, Any], folder: Path) -> Path:
    """Write `results` with their conditions to `<folder>/<name>.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"conditions": conditions(), **results}, indent=1) + "\n")
    return path


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError:
        return None


def _commit() -> str:
    """Short hash of the code that ran: what GIT_COMMIT says (for a copy without history), else the checkout's."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        run = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()

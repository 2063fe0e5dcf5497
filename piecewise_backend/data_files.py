"""Plain data on disk: written whole or not at all, read only when intact. Reading a file runs nothing of it."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_MOST_FILES = 64
"""In a folder; those that were not used for longest go."""


def files_of(folder: Path, key: str) -> Sequence[Path]:
    """Files that were written under `key`, the one used last first."""
    return sorted(folder.glob(f"{key}.*.json"), key=_age)


def read_data(path: Path) -> Any:
    """OSError, or ValueError for a file that was altered or cut short."""
    digest, _, body = path.read_bytes().partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("it was altered or cut short: the digest differs")
    return json.loads(body)


def write_data(folder: Path, key: str, data: Any) -> None:
    """Write a file of `data`; others under the same key stay. OSError where the folder cannot be written to."""
    body = json.dumps(data, separators=(",", ":")).encode()
    digest = hashlib.sha256(body).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(digest.encode() + b"\n" + body)
        os.replace(temporary, folder / f"{key}.{digest[:16]}.json")
    finally:
        Path(temporary).unlink(missing_ok=True)
    for old in sorted(folder.glob("*.json"), key=_age)[_MOST_FILES:]:
        old.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # another process has just removed it
        return 0.0

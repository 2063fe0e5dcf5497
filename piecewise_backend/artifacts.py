"""Compiled pieces on disk: written whole or not at all, believed only when intact.

An entry is two files. `<key>.json` is replaced atomically and names the artifact by its digest, so two processes that
compile the same piece at once cannot mix their halves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

FORMAT = 1


class ArtifactUnreadable(RuntimeError):
    """An entry exists but cannot be believed; the message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one artifact."""

    key: str
    digest: str
    guards: str
    """Python expression over the piece's symbolic inputs under which the code is valid; empty for none."""
    format: int = FORMAT


class ArtifactFolder:
    """A folder of compiled pieces, safe for several processes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, key: str) -> tuple[Entry, Path] | None:
        """The entry for `key` and its verified file; None when there is none.

        ArtifactUnreadable for an entry that is truncated, altered, or made by something else.
        """
        try:
            text = (self.folder / f"{key}.json").read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactUnreadable(f"its description cannot be read: {error}") from error
        try:
            entry = Entry(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ArtifactUnreadable(f"its description is not one of ours: {error}") from error
        if not all(isinstance(text, str) for text in (entry.key, entry.digest, entry.guards)):
            raise ArtifactUnreadable("its description is not one of ours: a text is missing")
        if entry.format != FORMAT or entry.key != key:
            raise ArtifactUnreadable(f"it is of format {entry.format} for key {entry.key[:12]}, expected {FORMAT}")
        if not entry.digest.isalnum():  # it becomes part of a path
            raise ArtifactUnreadable("its description names no digest")
        path = self._artifact_path(key, entry.digest)
        try:
            digest = _digest(path)
        except OSError as error:
            raise ArtifactUnreadable(f"its code cannot be read: {error}") from error
        if digest != entry.digest:
            raise ArtifactUnreadable("its code was altered or cut short: the digest differs")
        return entry, path

    def has(self, key: str) -> bool:
        """Whether there is an entry for `key`, intact or not."""
        return (self.folder / f"{key}.json").is_file()

    def store(self, key: str, guards: str, save: Callable[[str], None]) -> Path:
        """Write an entry; `save(path)` writes the artifact itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._temporary() as temporary:
            save(str(temporary))
            digest = _digest(temporary)
            path = self._artifact_path(key, digest)
            os.replace(temporary, path)
        with self._temporary() as temporary:
            temporary.write_text(json.dumps(asdict(Entry(key, digest, guards)), indent=1))
            os.replace(temporary, self.folder / f"{key}.json")
        return path

    def _artifact_path(self, key: str, digest: str) -> Path:
        return self.folder / f"{key}.{digest[:16]}.artifact"

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[Path]:
        handle, name = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
        os.close(handle)
        try:
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

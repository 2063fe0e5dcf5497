"""The folder of one dump: files with captions, and only files of its own."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

MANIFEST = "mrv2_dump.json"
"""Names of what a dump wrote, so that the next one into the same folder removes that and nothing else."""


@dataclass(slots=True)
class DumpFolder:
    """Writes text files. What cannot be written becomes a problem, which the index lists; nothing is raised."""

    path: Path
    files: dict[str, str] = field(default_factory=dict)
    """Name to caption, in order."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> DumpFolder:
        """The folder, empty of an earlier dump's files. OSError, naming the folder, where it cannot be written."""
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f"{MANIFEST}.new"
            probe.write_text("[]")
            _remove_earlier(path)
            probe.replace(path / MANIFEST)
        except OSError as error:
            raise type(error)(f"a dump cannot be written to {path}: {error}; give a folder that is writable") from error
        return cls(path)

    def write(self, name: str, text: str, caption: str) -> None:
        """Write `text` under `name`. Python that does not parse becomes a .txt file, with a line that says so."""
        if name.endswith(".py"):
            try:
                compile(text, name, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                name = name.removesuffix(".py") + ".txt"
                caption += f" (no valid Python: {error})"
        try:
            target = self.path / name
            target.parent.mkdir(exist_ok=True)
            target.write_text(text, encoding="utf-8", errors="backslashreplace")
            self.files[name] = caption
            (self.path / MANIFEST).write_text(json.dumps(list(self.files), indent=1))
        except OSError as error:
            self.problems.append(f"{name} was not written: {error}")


def _remove_earlier(path: Path) -> None:
    try:
        names = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return
    inside = [
        path / str(name) for name in names if ".." not in Path(str(name)).parts and not Path(str(name)).is_absolute()
    ]
    for file in inside:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in inside} - {path}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def plain_name(text: str) -> str:
    """`text` as a part of a file's name and of a Python identifier."""
    return re.sub(r"\W", "_", text)

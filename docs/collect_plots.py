"""Collect the plots of notebooks and benchmarks: `python -m docs.collect_plots [FOLDER]`.

Copies what the stored notebooks show and what is drawn from the decode records into docs/images/plots or FOLDER, so
that the pages show the same pictures.
"""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLOTS = ROOT / "docs" / "images" / "plots"

# Pictures of a notebook, in its order.
NOTEBOOKS = {
    "04_sizes_padding_and_memory": ("padding_waste", "memory_by_size", "memory_budget"),
    "05_speculation": ("accepted_guesses",),
}
RECORDS = ("decode_qwen3-0.6b", "decode_llama-3.1-8b")


def main(folder: Path = PLOTS) -> None:
    """Write every picture."""
    folder.mkdir(parents=True, exist_ok=True)
    for notebook, names in NOTEBOOKS.items():
        for name, picture in zip(names, pictures(ROOT / "notebooks" / f"{notebook}.ipynb"), strict=True):
            (folder / f"{name}.png").write_bytes(picture)
    for record in RECORDS:
        shutil.copyfile(ROOT / "benchmarks" / "results" / f"{record}.png", folder / f"{record}.png")


def pictures(notebook: Path) -> Iterator[bytes]:
    """The PNGs among the stored outputs of a notebook."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield base64.b64decode(output["data"]["image/png"])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

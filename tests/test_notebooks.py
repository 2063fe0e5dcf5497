"""Every notebook runs from its first cell to its last in a fresh kernel, and what is stored with it is small."""

import ast
import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from ipykernel.kernelspec import write_kernel_spec
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
KERNEL = "mrv2-tests"
TIMEOUT_S = 300
MAX_CELLS = 27
MAX_OUTPUT_BYTES = 20_000
"""Of a notebook, images apart."""
MAX_IMAGE_BYTES = 60_000
NOT_STORED = "output-not-stored"
"""Tag of a cell whose output is too large to be stored."""
# Two components at least; not the tail of a relative path, of a word, or of an address.
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<-])(?:~|/[\w.-]+)/[\w.-]+|\b[A-Za-z]:\\\w")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def kernel_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a kernel that runs this very Python, with folders of its own: nothing need be installed, and nobody's
    start-up files are read."""
    write_kernel_spec(str(tmp_path / "jupyter" / "kernels" / KERNEL))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MRV2_CACHE_DIR", str(tmp_path / "cache"))
    return KERNEL


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(path: Path) -> list[nbformat.NotebookNode]:
    return [output for cell in code_cells(nbformat.read(path, as_version=4)) for output in cell.outputs]


def without_images(value: object) -> object:
    """An output less its images: their characters mean nothing, and their size is measured apart."""
    if isinstance(value, dict):
        return {name: without_images(item) for name, item in value.items() if not name.startswith("image/")}
    return [without_images(item) for item in value] if isinstance(value, list) else value


def image_sizes(path: Path) -> list[int]:
    """Bytes of each stored image."""
    found = [item for output in outputs(path) for item in output.get("data", {}).items()]
    return [
        len(data.encode() if kind == "image/svg+xml" else base64.b64decode(data))
        for kind, data in found
        if kind.startswith("image/")
    ]


def texts(value: object) -> Iterator[str]:
    """Strings within an output."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS, f"no *.ipynb in {ROOT / 'notebooks'}"


@each_notebook
def test_a_notebook_runs_without_an_error_in_a_fresh_kernel(path: Path, kernel_here: str) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, kernel_name=kernel_here, timeout=TIMEOUT_S, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()  # CellExecutionError names the cell that erred
    assert not [o for cell in code_cells(notebook) for o in cell.outputs if o.output_type == "error"]
    assert all(cell.execution_count for cell in code_cells(notebook) if cell.source.strip()), "not every cell ran"


@each_notebook
def test_the_last_code_cell_of_a_notebook_asserts_something(path: Path) -> None:
    last = code_cells(nbformat.read(path, as_version=4))[-1]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(last.source))), last.source


@each_notebook
def test_outputs_stored_in_a_notebook_are_small(path: Path) -> None:
    found = outputs(path)
    assert found, f"{path.name} is stored without outputs: execute it"
    size = len(json.dumps(without_images(found)).encode())
    assert size < MAX_OUTPUT_BYTES, f"{size} bytes of outputs; allowed are {MAX_OUTPUT_BYTES}"
    images = image_sizes(path)
    assert max(images, default=0) < MAX_IMAGE_BYTES, f"images of {images} bytes; allowed are {MAX_IMAGE_BYTES} each"


@each_notebook
def test_an_output_too_large_to_be_stored_is_cleared(path: Path) -> None:
    tagged = [c for c in code_cells(nbformat.read(path, as_version=4)) if NOT_STORED in c.metadata.get("tags", ())]
    assert not any(cell.outputs for cell in tagged), f"clear the outputs of cells tagged {NOT_STORED!r}"


@each_notebook
def test_a_notebook_is_short_enough_to_be_read(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert len(cells) <= MAX_CELLS, f"{len(cells)} cells; allowed are {MAX_CELLS}"


@each_notebook
def test_outputs_stored_in_a_notebook_hold_no_error_and_no_absolute_path(path: Path) -> None:
    found = outputs(path)
    assert not [output for output in found if output.output_type == "error"]
    paths = [match[0] for text in texts(without_images(found)) for match in ABSOLUTE_PATH.finditer(text)]
    assert not paths, f"absolute paths in the outputs of {path.name}: {paths}"


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("wrote /home/someone/x.json", True),
        ('File "/usr/lib/python3/ast.py"', True),
        ("~/.cache/mrv2", True),
        ("C:\\Users", True),
        ("see https://arxiv.org/abs/2312.00752", False),
        ("benchmarks/results/smoke_h200.json", False),
        ("./notebooks/results/x", False),
        ("12 ms/step, 3 / 4", False),
        ("</span></pre>", False),
    ],
)
def test_an_absolute_path_is_told_from_what_looks_like_one(text: str, is_found: bool) -> None:
    assert bool(ABSOLUTE_PATH.search(text)) == is_found

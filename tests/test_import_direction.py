"""Imports point one way. Every import statement counts: lazy, conditional and type-checking ones too."""

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ATTENTION, BACKEND = "attention", "piecewise_backend"

# The layer of each top-level module of piecewise_backend: it imports from its own layer and from lower ones.
# The package's __init__ re-exports the public names, so only the command line may import from it.
LAYER = {
    "names": 0,
    "reasons": 0,
    "config": 0,
    "collector": 0,
    "data_files": 0,
    "split": 1,
    "breakpoints": 1,
    "structure": 1,
    "containers": 1,
    "views": 1,
    "regions": 1,
    "inline": 1,
    "merge_linears": 1,
    "writes": 1,
    "dynamic": 1,
    "environment": 1,
    "source_lines": 1,
    "origin": 1,
    "artifacts": 1,
    "lowering": 1,
    "compile": 1,
    "compiler_start": 1,
    "piece_code": 1,
    "facts": 1,
    "cudagraph": 1,
    "reporting": 1,
    "observe": 1,
    "program": 2,
    "structured_trace": 2,
    "dumping": 2,
    "static_inputs": 2,
    "padding": 2,
    "outputs": 2,
    "capture_plan": 2,
    "plain": 2,
    "variants": 2,
    "backend": 3,
    "lookup": 3,
    "runner": 4,
    "doctor": 4,
    "dry_run": 4,
    "bench": 4,
    "verifying": 4,
    "repro": 4,
    "cli": 5,
    "__main__": 5,
    "__init__": 5,
}

KERNEL_LIBRARIES = {"flashinfer", "triton", "flash_attn"}
KERNEL_FOLDERS = (Path(ATTENTION, "backends"), Path(ATTENTION, "kernels"))


class Import(NamedTuple):
    file: Path  # relative to the root
    line: int
    name: str  # absolute and dotted; `from a.b import c` gives a.b.c

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.name}"


def source_files(package: str) -> list[Path]:
    files = sorted(path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py"))
    assert files, f"no Python files under {package}/"
    return files


def imports_in(file: Path) -> Iterator[Import]:
    package = ".".join(file.parent.parts)
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=str(file))):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                base = resolve_name("." * level + (module or ""), package)
                found = [f"{base}.{alias.name}" for alias in names]
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]) if called(func) in {
                "import_module",
                "__import__",
            }:
                found = [resolve_name(name, package)]
            case _:
                continue
        yield from (Import(file, node.lineno, name) for name in found)


def called(func: ast.expr) -> str | None:
    return getattr(func, "attr", None) or getattr(func, "id", None)


def top_level_modules() -> set[str]:
    """Names directly under piecewise_backend/: each file, and each folder that holds Python files."""
    return {file.relative_to(BACKEND).parts[0].removesuffix(".py") for file in source_files(BACKEND)}


def imported_module(name: str) -> str | None:
    """The top-level module of piecewise_backend that a dotted name reaches; None for other packages."""
    package, *rest = name.split(".")
    if package != BACKEND:
        return None
    return rest[0] if rest and rest[0] in top_level_modules() | LAYER.keys() else "__init__"


def lines(violations: list[str]) -> str:
    return "\n".join(violations)


def test_attention_imports_nothing_of_the_piecewise_backend() -> None:
    violations = [
        str(found)
        for file in source_files(ATTENTION)
        for found in imports_in(file)
        if imported_module(found.name) is not None
    ]
    assert not violations, lines(violations)


def test_every_module_of_the_piecewise_backend_has_a_layer() -> None:
    unknown = top_level_modules() - LAYER.keys()
    assert not unknown, f"give {sorted(unknown)} a layer in LAYER ({Path(__file__).name})"


def test_a_module_of_the_piecewise_backend_imports_from_its_own_layer_or_lower_ones() -> None:
    violations = []
    for file in source_files(BACKEND):
        importer = file.relative_to(BACKEND).parts[0].removesuffix(".py")
        for found in imports_in(file):
            imported = imported_module(found.name)
            if imported in LAYER and importer in LAYER and LAYER[imported] > LAYER[importer]:
                violations.append(f"{found}: {importer} may not import from {imported}")
    assert not violations, lines(violations)


def test_kernel_libraries_are_imported_under_attention_backends_and_kernels_only() -> None:
    violations = [
        str(found)
        for package in (ATTENTION, BACKEND)
        for file in source_files(package)
        if not any(file.is_relative_to(folder) for folder in KERNEL_FOLDERS)
        for found in imports_in(file)
        if found.name.split(".")[0] in KERNEL_LIBRARIES
    ]
    assert not violations, lines(violations)

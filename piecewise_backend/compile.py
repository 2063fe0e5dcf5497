"""A piece to a callable: identical pieces once, kept on disk between processes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from piecewise_backend.artifacts import ArtifactFolder, ArtifactUnreadable
from piecewise_backend.reasons import Reason, ReasonCode, Reasons
from piecewise_backend.structure import structure_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompiledPiece:
    """One distinct piece."""

    run: Callable[..., Any]
    """Takes the piece's inputs, returns the tuple of its outputs."""
    key: str
    source: str
    """"inductor", "disk", "aot_eager" or "eager"."""
    seconds: float

    @property
    def opaque(self) -> bool:
        """Whether the piece launches kernels that no dispatch mode sees."""
        return self.source in ("inductor", "disk")


_in_process: dict[str, CompiledPiece] = {}


def forget_compiled_pieces() -> None:
    """Drop this process's compiled pieces; the next compile reads the disk or compiles."""
    _in_process.clear()


class PieceCompiler:
    """Compiles the pieces of one program."""

    def __init__(
        self, *, compiler: str, compiler_options: Mapping[str, Any], cache_dir: Path | None, reasons: Reasons
    ) -> None:
        self.compiler = compiler
        self.compiler_options = dict(compiler_options)
        self.artifacts = ArtifactFolder(cache_dir / "pieces") if cache_dir is not None else None
        self.inductor_dir = cache_dir / "inductor" if cache_dir is not None else None
        self.reasons = reasons

    def keys(self, modules: list[fx.GraphModule]) -> list[str]:
        """Keys of all pieces, computed before any is compiled: compiling may add guards to shared shape symbols."""
        environment = environment_text(self.compiler, self.compiler_options)
        return [hashlib.sha256(f"{environment}\n{structure_text(m)}".encode()).hexdigest() for m in modules]

    def compile(self, module: fx.GraphModule, key: str) -> CompiledPiece:
        """The callable for `module`; `module` is not changed."""
        if key in _in_process:
            return _in_process[key]
        started = time.perf_counter()
        with torch.no_grad():
            run, source = self._compile(module, key)
        piece = CompiledPiece(run, key, source, time.perf_counter() - started)
        logger.info("piece %s: %s in %.2f s", key[:12], source, piece.seconds)
        _in_process[key] = piece
        return piece

    def _compile(self, module: fx.GraphModule, key: str) -> tuple[Callable[..., Any], str]:
        if self.compiler == "eager":
            return module.forward, "eager"
        examples = [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]
        if self.compiler == "aot_eager":
            return _aot_eager(module, examples), "aot_eager"
        with _inductor_cache(self.inductor_dir):
            loaded = self._load(key, examples)
            if loaded is not None:
                return loaded, "disk"
            try:
                return self._inductor(module, key, examples), "inductor"
            except Exception as error:
                if not _compiler_is_missing(error):
                    raise
                self.reasons.add(
                    Reason(
                        ReasonCode.COMPILER_UNAVAILABLE, "compiler", f"Inductor cannot build code here: {error}",
                        "install a C++ compiler, or ask for options={'compiler': 'eager'}",
                    )
                )
                return module.forward, "eager"

    def _inductor(self, module: fx.GraphModule, key: str, examples: list[Any]) -> Callable[..., Any]:
        artifact = torch._inductor.standalone_compile(
            module, examples, dynamic_shapes=_shapes_from(module), options={"config_patches": self.compiler_options}
        )
        if self.artifacts is not None:
            try:
                guards = _guards_expression(examples)
                self.artifacts.store(key, guards, lambda path: artifact.save(path=path, format="binary"))
            except Exception as error:
                self.reasons.add(Reason(ReasonCode.ARTIFACT_NOT_SAVED, f"piece {key[:12]}", f"{error}"))
        return artifact

    def _load(self, key: str, examples: list[Any]) -> Callable[..., Any] | None:
        if self.artifacts is None:
            return None
        try:
            found = self.artifacts.find(key)
            if found is None:
                return None
            entry, path = found
            if entry.guards and not _guards_hold(entry.guards, examples):
                return None
            try:
                return torch._inductor.CompiledArtifact.load(path=str(path), format="binary")
            except Exception as error:
                raise ArtifactUnreadable(f"torch cannot load it: {type(error).__name__}: {error}") from error
        except ArtifactUnreadable as error:
            self.reasons.add(
                Reason(
                    ReasonCode.ARTIFACT_UNREADABLE, f"artifact {key[:12]}", f"{error}; compiled again",
                    f"nothing to do; the entry in {self.artifacts.folder} was replaced",
                )
            )
            return None


def environment_text(compiler: str, compiler_options: Mapping[str, Any]) -> str:
    """What besides a piece's structure decides its code: torch, compiler, device, settings. One fact a line."""
    from torch._inductor.codecache import torch_key

    lines = [f"torch {torch_key().hex()}", f"compiler {compiler} {sorted(compiler_options.items())}"]
    if compiler == "inductor":
        lines.append(f"inductor {_portable(torch._inductor.config.save_config_portable())}")
        lines.append(f"functorch {_portable(torch._functorch.config.save_config_portable())}")
    lines.append(f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        lines.append(f"gpu {torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {torch.version.cuda}")
    lines.append(
        f"precision {torch.get_float32_matmul_precision()} {torch.get_default_dtype()} "
        f"{torch.are_deterministic_algorithms_enabled()}"
    )
    for device in ("cpu", "cuda"):
        lines.append(f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}")
    return "\n".join(lines)


def _portable(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings that are values; callables and objects print an address that changes from process to process."""
    plain = (str, int, float, bool, type(None), tuple, list, dict, set)
    return sorted((k, repr(v)) for k, v in config.items() if isinstance(v, plain) and " at 0x" not in repr(v))


def _aot_eager(module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.aot_autograd import make_boxed_compiler

    return aot_autograd(fw_compiler=make_boxed_compiler(nop))(module, examples)


def _shapes_from(module: fx.GraphModule) -> str:
    """torch reads the shape environment off an output tensor; a piece that only writes into its inputs has none."""
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    fakes = (isinstance(n.meta.get("example_value"), torch.Tensor) for n in output.args[0] if isinstance(n, fx.Node))
    return "from_graph" if any(fakes) else "from_tracing_context"


def _symints(examples: list[Any]) -> list[torch.SymInt]:
    return [e for e in examples if isinstance(e, torch.SymInt)]


def _guards_expression(examples: list[Any]) -> str:
    symints = _symints(examples)
    if not symints:
        return ""
    return symints[0].node.shape_env.produce_guards_expression(placeholders=symints) or ""


def _guards_hold(expression: str, examples: list[Any]) -> bool:
    """Evaluates the saved guards on this trace's symbols, which also adds them to its guards."""
    symints = _symints(examples)
    return bool(symints[0].node.shape_env.evaluate_guards_expression(expression, symints))


def _compiler_is_missing(error: BaseException) -> bool:
    names = {type(e).__name__ for e in (error, error.__cause__, error.__context__) if e is not None}
    return "InvalidCxxCompiler" in names or "InvalidCxxCompiler" in str(error)


@contextlib.contextmanager
def _inductor_cache(folder: Path | None) -> Iterator[None]:
    """Keep what Inductor itself writes (sources, built libraries) beside the artifacts that refer to it."""
    if folder is None:
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with temporary_cache_dir(str(folder)):
        yield

"""A piece to a callable: identical pieces once, kept on disk between processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx

from attention.kernels.ahead import KernelsAhead
from attention.kernels.digest import wait_for_digest
from piecewise_backend.artifacts import ArtifactFolder, ArtifactUnreadable
from piecewise_backend.breakpoints import target_names
from piecewise_backend.config import Options
from piecewise_backend.environment import environment_text
from piecewise_backend.lowering import LOWERINGS, launches_ahead, lowered_for_gpu
from piecewise_backend.names import unknown_name
from piecewise_backend.reasons import Reason, ReasonCode, Reasons
from piecewise_backend.structure import known_of_sizes, sizes_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class CompiledPiece:
    """One distinct piece."""

    run: Callable[..., Any]
    """Takes the piece's inputs, returns the tuple of its outputs."""
    key: str
    source: str
    """"inductor", "disk", "aot_eager" or "eager"."""
    seconds: float
    guards: str = ""
    """Python expression over the piece's symbolic sizes that must hold for this code; empty for none."""
    fallback: Reason | None = None
    """Why it is not what was asked for."""

    @property
    def opaque(self) -> bool:
        """Whether the piece launches kernels that no dispatch mode sees."""
        return self.source in ("inductor", "disk")


_in_process: dict[str, CompiledPiece] = {}
_alive: weakref.WeakValueDictionary[str, CompiledPiece] = weakref.WeakValueDictionary()


def compiled_piece(key: str) -> CompiledPiece | None:
    """The piece last compiled or loaded under `key` that something in this process still holds."""
    return _alive.get(key)


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
        self.kernels = KernelsAhead(in_workers=compiler == "inductor")
        """Of what is compiled: to be waited for before anything runs."""
        self._environment: str | None = None
        self._done: dict[str, CompiledPiece] = {}
        self._refused: set[str] = set()

    @classmethod
    def from_options(cls, options: Options, reasons: Reasons) -> PieceCompiler:
        """As `options` ask for it."""
        return cls(
            compiler=options.compiler,
            compiler_options=(fast_options() if options.fast_pieces else _DEFAULT) | dict(options.compiler_options),
            cache_dir=options.cache_dir if options.cache else None,
            reasons=reasons,
        )

    def key(self, structure: str) -> str:
        """What an artifact of a piece of this structure is kept under. ValueError for an unknown compiler option."""
        if self._environment is None:
            check_compiler_options(self.compiler_options)
            self._environment = environment_text(self.compiler, self.compiler_options)
        return hashlib.sha256(f"{self._environment}\n{LOWERINGS}\n{structure}".encode()).hexdigest()

    def compile(self, module: fx.GraphModule, key: str) -> CompiledPiece:
        """The callable for `module`; `module` is not changed."""
        sizes = sizes_of(module)
        piece = self._done.get(key) or _in_process.get(key)
        if piece is None or not _guards_hold(piece.guards, sizes):
            started = time.perf_counter()
            with torch.no_grad():
                piece = self._compile(module, key, sizes)
            piece = dataclasses.replace(piece, seconds=time.perf_counter() - started)
            logger.info("piece %s: %s in %.2f s", key[:12], piece.source, piece.seconds)
            _in_process[key] = _alive[key] = piece
        if piece.fallback is not None and key not in self._done:
            self.reasons.add(piece.fallback)
        self._done[key] = piece
        return piece

    def load(self, key: str, sizes: list[torch.SymInt]) -> CompiledPiece | None:
        """A piece that was compiled before, by this process or another; None where there is none that holds for
        `sizes`, the symbolic sizes among its inputs."""
        piece = self._done.get(key) or _in_process.get(key)
        if piece is None or piece.fallback is not None or not _guards_hold(piece.guards, sizes):
            started = time.perf_counter()
            with _inductor_cache(self.inductor_dir):
                piece = self._load(key, sizes)
            if piece is None:
                return None
            piece = dataclasses.replace(piece, seconds=time.perf_counter() - started)
            _in_process[key] = _alive[key] = piece
        self._done[key] = piece
        return piece

    def is_on_disk(self, key: str) -> bool:
        """Whether an artifact is kept under `key`; whether it is intact shows when it is loaded."""
        return self.artifacts is not None and self.artifacts.has(key)

    def compile_if_possible(self, module: fx.GraphModule, key: str) -> CompiledPiece | None:
        """The same for an operator that also runs as traced; None, with a reason, where the compiler refuses it."""
        if self.compiler != "inductor" or key in self._refused:
            return None
        try:
            return self.compile(module, key)
        except Exception as error:
            self._refused.add(key)
            detail = f"Inductor refuses it, it runs as traced: {type(error).__name__}: {str(error).splitlines()[0]}"
            self.reasons.add(Reason(ReasonCode.COMPILER_UNAVAILABLE, _operator_name(module), detail))
            return None

    def _compile(self, module: fx.GraphModule, key: str, sizes: list[torch.SymInt]) -> CompiledPiece:
        if self.compiler == "eager":
            return CompiledPiece(module.forward, key, "eager", 0.0)
        if self.compiler == "aot_eager":
            known = known_of_sizes(sizes)
            run = torch._dynamo.lookup_backend("aot_eager")(module, _examples(module))
            return CompiledPiece(run, key, "aot_eager", 0.0, _new_guards(known, sizes))
        with _inductor_cache(self.inductor_dir):
            return self._load(key, sizes) or self._inductor(module, key, sizes)

    def _inductor(self, module: fx.GraphModule, key: str, sizes: list[torch.SymInt]) -> CompiledPiece:
        known = known_of_sizes(sizes)
        lowered = lowered_for_gpu(module, self.compiler_options)
        self.kernels.compile(launches_ahead(lowered))
        wait_for_digest()
        try:
            artifact = torch._inductor.standalone_compile(
                lowered,
                _examples(module),
                dynamic_shapes=_shapes_from(module),
                options={"config_patches": self.compiler_options},
            )
        except Exception as error:
            if not _compiler_is_missing(error):
                raise
            return CompiledPiece(module.forward, key, "eager", 0.0, fallback=_no_compiler(error))
        guards = _new_guards(known, sizes)
        if self.artifacts is not None:
            try:
                self.artifacts.store(key, guards, lambda path: artifact.save(path=path, format="binary"))
            except Exception as error:
                detail = f"{type(error).__name__}: {error}"
                hint = f"make {self.artifacts.folder} writable, or set options={{'cache': False}}"
                self.reasons.add(
                    Reason(
                        ReasonCode.ARTIFACT_NOT_SAVED,
                        f"piece {key[:12]}",
                        detail,
                        hint if isinstance(error, OSError) else "",
                    )
                )
        return CompiledPiece(artifact, key, "inductor", 0.0, guards)

    def _load(self, key: str, sizes: list[torch.SymInt]) -> CompiledPiece | None:
        if self.artifacts is None:
            return None
        try:
            found = self.artifacts.find(key)
            if found is None:
                return None
            entry, path = found
            try:
                if not _guards_hold(entry.guards, sizes):
                    return None
                wait_for_digest()
                run = torch._inductor.CompiledArtifact.load(path=str(path), format="binary")
            except Exception as error:
                raise ArtifactUnreadable(f"torch cannot load it: {type(error).__name__}: {error}") from error
            return CompiledPiece(run, key, "disk", 0.0, entry.guards)
        except ArtifactUnreadable as error:
            self.reasons.add(
                Reason(
                    ReasonCode.ARTIFACT_UNREADABLE,
                    f"artifact {key[:12]}",
                    f"{error}; compiled again",
                    f"nothing to do, if it does not come again; {self.artifacts.folder} may be deleted at any time",
                )
            )
            return None


_DEFAULT: dict[str, Any] = {"triton.autotune_pointwise": False}
"""Inductor's choice among tiles of a pointwise kernel, timed for the number of tokens of the trace, says nothing about
other numbers (no row of a decode step differed by more than 0.5 %), and compiling up to six for one takes seconds."""
_FAST = {"coordinate_descent_tuning": True, "triton.enable_pdl": True, "assert_indirect_indexing": False}


def fast_options() -> dict[str, Any]:
    """Inductor's options behind `fast_pieces`, those that this torch has."""
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    has_pdl = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {k: v for k, v in _FAST.items() if k in known and (has_pdl or k != "triton.enable_pdl")}


def check_compiler_options(options: Mapping[str, Any]) -> None:
    """ValueError for an option that Inductor does not have, or that would record graphs of its own."""
    if not options:
        return
    import torch._inductor.config as inductor_config

    known = inductor_config.get_config_copy()
    for name, value in options.items():
        if name not in known:
            raise unknown_name("compiler option", name, known)
        if name == "triton.cudagraphs" and value:
            raise ValueError(
                "compiler option 'triton.cudagraphs' would record graphs inside the pieces that are recorded here; "
                "leave it out: options={'mode': 'FULL_AND_PIECEWISE'} records the whole model"
            )


def _operator_name(module: fx.GraphModule) -> str:
    return next(target_names(n.target)[-1] for n in module.graph.nodes if n.op == "call_function")


def _examples(module: fx.GraphModule) -> list[Any]:
    return [n.meta.get("example_value") for n in module.graph.nodes if n.op == "placeholder"]


def _shapes_from(module: fx.GraphModule) -> Literal["from_graph", "from_tracing_context"]:
    """torch reads the shape environment off an output tensor; a piece that only writes into its inputs has none."""
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    fakes = (isinstance(n.meta.get("example_value"), torch.Tensor) for n in output.args[0] if isinstance(n, fx.Node))
    return "from_graph" if any(fakes) else "from_tracing_context"


def _new_guards(known: str, sizes: list[torch.SymInt]) -> str:
    """What compiling came to rely on besides what was known, which is part of the key."""
    guards = known_of_sizes(sizes)
    return "" if guards == known else guards


def _guards_hold(guards: str, sizes: list[torch.SymInt]) -> bool:
    """Whether code made under `guards` serves this trace, which is guarded by them from now on."""
    if not guards:
        return True
    return bool(sizes) and bool(sizes[0].node.shape_env.evaluate_guards_expression(guards, sizes))


def _compiler_is_missing(error: BaseException) -> bool:
    """Whether the machine, not the piece, is at fault: no C++ or C compiler, or one that lacks its headers."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        if type(current).__name__ in ("InvalidCxxCompiler", "CppCompileError", "TritonMissing"):
            return True
        if "InvalidCxxCompiler" in str(current) or "Failed to find C compiler" in str(current):
            return True
        current = current.__cause__ or current.__context__
    return False


def _no_compiler(error: BaseException) -> Reason:
    lines = [line for line in str(error).splitlines() if line.strip()]
    detail = f"Inductor cannot build code here, pieces run as traced: {lines[0] if lines else type(error).__name__}"
    hint = "install a C++ compiler (and set CXX to it), or ask for options={'compiler': 'eager'}"
    return Reason(ReasonCode.COMPILER_UNAVAILABLE, "compiler", detail, hint)


@contextlib.contextmanager
def _inductor_cache(folder: Path | None) -> Iterator[None]:
    """Keep what Inductor itself writes (sources, built libraries) beside the artifacts that refer to it."""
    if folder is None or not _is_writable(folder):
        yield
        return
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    with temporary_cache_dir(str(folder)):
        yield


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)

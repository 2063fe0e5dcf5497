"""What Dynamo made of each Python function, decompiled by depyf.

depyf's `prepare_debug` is not used. In 0.20.0 it replaces functions inside of torch, and two of these replacements
break: `patched_load_by_key_path` lacks the keyword `set_sys_modules` that torch calls `PyCodeCache.load_by_key_path`
with from 2.13 on, and `CodeProxy.decompile_with_name` reads `co_name` of whatever a backend returned, which need not
have one. Its decompiler alone needs neither: Dynamo shows each code object to a hook, and the hook returns nothing, so
what runs is Dynamo's own. (`prepare_debug` would add breakpoints in the decompiled files; it can come back once both
are repaired in depyf.)
"""

from __future__ import annotations

import dis
import importlib.util
import io
import textwrap
import types
from typing import Any

import torch

from piecewise_backend.dumping.folder import DumpFolder, plain_name

MISSING = "depyf is not installed, so Dynamo's bytecode is not decompiled; everything else is here (pip install depyf)"


class BytecodeDump:
    """Writes `dynamo_<n>_<function>.py` for each code object that Dynamo makes, from `open` to `close`."""

    def __init__(self, folder: DumpFolder) -> None:
        self.folder = folder
        self._seen: list[tuple[str, types.CodeType]] = []
        self._handle: Any = None

    def open(self) -> None:
        """Begin to look on."""
        if importlib.util.find_spec("depyf") is None:
            self.folder.problems.append(MISSING)
        self._handle = torch._dynamo.convert_frame.register_bytecode_hook(self._on_code)

    def close(self) -> None:
        """Stop, and write the guards under which each function's code is used."""
        self._handle.remove()
        written = set()
        for name, code in self._seen:
            if code not in written:
                written.add(code)
                self._write_guards(name, code)

    def _on_code(self, code: types.CodeType, new_code: types.CodeType) -> None:
        name = f"dynamo_{len(self._seen)}_{plain_name(code.co_name)}"
        self._seen.append((name, code))
        where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        try:
            source = _decompiled(new_code)
        except Exception as error:  # of a decompiler that lags behind Python: never the model's problem
            text = io.StringIO()
            dis.dis(new_code, file=text)
            self.folder.write(f"{name}.txt", text.getvalue(), f"bytecode that Dynamo made of {where}")
            if importlib.util.find_spec("depyf") is not None:
                self.folder.problems.append(f"depyf cannot decompile {name}: {type(error).__name__}: {error}")
            return
        header = f'"""What Dynamo made of {where}, decompiled."""\n\n'
        self.folder.write(f"{name}.py", header.replace("\\", "/") + source, f"what Dynamo made of {where}")

    def _write_guards(self, name: str, code: types.CodeType) -> None:
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        try:
            entries = _debug_get_cache_entry_list(code)
            texts = [str(getattr(entry, "guard_manager", None) or entry.check_fn) for entry in entries]
        except Exception as error:  # a private interface
            self.folder.problems.append(f"the guards of {name} cannot be read: {type(error).__name__}: {error}")
            return
        if texts:
            text = "\n\n".join(f"entry {i}\n{t}" for i, t in enumerate(texts))
            self.folder.write(f"{name}_guards.txt", text, f"guards of {code.co_name}: when its compiled code is used")


def _decompiled(code: types.CodeType) -> str:
    """Source of a function; of one that reads variables of a function around it, with a function around it that has
    them, since `nonlocal` alone is no Python."""
    import depyf

    name = plain_name(code.co_name)
    source = depyf.decompile(code.replace(co_name=name))
    if not code.co_freevars:
        return source
    return f"def closure({', '.join(code.co_freevars)}):\n{textwrap.indent(source, '    ')}\n    return {name}\n"

"""What besides a piece's structure decides its code: torch, compiler, device, settings of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_PLAIN = (str, int, float, bool, type(None))


def environment_text(compiler: str, compiler_options: Mapping[str, Any]) -> str:
    """One fact a line. The same in every process on such a machine: no process id, rank, folder or address."""
    lines = [f"torch {torch.__version__}", f"compiler {compiler} {stable_text(dict(compiler_options))}"]
    if compiler == "inductor":  # the others are kept in this process only
        from torch._inductor.codecache import torch_key

        lines.append(f"sources {torch_key().hex()}")
        lines.append(f"inductor {_settings(torch._inductor.config.save_config_portable())}")
        lines.append(f"functorch {_settings(torch._functorch.config.save_config_portable())}")
    lines.append(f"cpu {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        lines.append(f"gpu {torch.cuda.get_device_name()} {torch.cuda.get_device_capability()} {torch.version.cuda}")
        matmul = torch.backends.cuda.matmul
        lines.append(
            f"matmul {matmul.allow_tf32} {matmul.allow_fp16_reduced_precision_reduction} "
            f"{matmul.allow_bf16_reduced_precision_reduction} cudnn {torch.backends.cudnn.allow_tf32}"
        )
    lines.append(
        f"precision {torch.get_float32_matmul_precision()} {torch.get_default_dtype()} "
        f"{torch.are_deterministic_algorithms_enabled()} inference {torch.is_inference_mode_enabled()}"
    )
    for device in ("cpu", "cuda"):
        lines.append(f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}")
    return "\n".join(lines)


def stable_text(value: Any) -> str:
    """`value` as text that does not change from process to process: sets sorted, addresses left out."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{stable_text(k)}: {stable_text(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(stable_text, value))) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(stable_text, value))})"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _settings(config: Mapping[str, Any]) -> str:
    """A configuration without the names of folders."""
    return stable_text({k: v for k, v in config.items() if not k.endswith(("_path", "_dir"))})

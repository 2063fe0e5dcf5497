"""Where the device's time goes: the kernels of some steady steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import write


def profile_steps(step: Callable[[], Any], steps: int, name: str, folder: Path) -> None:
    """Run `steps` steps under the profiler and write `<folder>/<name>.json` and `.md`.

    On the CPU the rows are operators instead of kernels.
    """
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize()
    rows = kernel_rows(found, steps, on_gpu)
    total = sum(row["us_per_step"] for row in rows)
    path = write(name, {"steps": steps, "us_per_step": total, "kernels": rows}, folder)
    path.with_suffix(".md").write_text(f"{name}: {total:.0f} us a step.\n\n{kernel_table(rows)}")
    print(f"{total:.0f} us a step\n{kernel_table(rows[:12])}", flush=True)


def kernel_rows(found: profile, steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Kernels by their total time, longest first."""
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    times = [
        (e.key, e.count, e.self_device_time_total if on_gpu else e.self_cpu_time_total)
        for e in found.key_averages()
        if e.device_type == wanted
    ]
    total = sum(us for _, _, us in times) or 1.0
    return [
        {"name": key, "count_per_step": count / steps, "us_per_step": us / steps, "share": us / total}
        for key, count, us in sorted(times, key=lambda row: -row[2])
    ]


def kernel_table(rows: list[dict[str, Any]]) -> str:
    """Markdown; long names are cut."""
    lines = ["| kernel | per step | us per step | share |", "|---|---:|---:|---:|"]
    for row in rows:
        name = row["name"][:90].replace("|", "/")
        lines.append(f"| `{name}` | {row['count_per_step']:g} | {row['us_per_step']:.1f} | {row['share']:.1%} |")
    return "\n".join([*lines, ""])

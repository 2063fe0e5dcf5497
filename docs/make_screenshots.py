"""Make the pictures of a report: `python -m docs.make_screenshots [FOLDER]`.

Runs a Llama and a hybrid model on the CPU with the emulated recorder, and photographs the pages of their reports into
docs/images or FOLDER.
"""

from __future__ import annotations

import site
import sys
import tempfile
from pathlib import Path

import torch

import piecewise_backend
from piecewise_backend import Report
from piecewise_backend.runner import LLM, Engine, SamplingParams
from tests.browser import Page, open_browser, why_no_browser
from tests.hybrid import VOCAB, make_hybrid_runner

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def llama() -> Report:
    """Twelve layers, served for a while: decode in one graph, prefills piece by piece."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    options = {"recorder": "emulated", "cache": False, "capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    llm = LLM(LlamaForCausalLM(config), device="cpu", options=options, max_num_tokens=64, max_num_reqs=8)
    prompts = [[1 + i] * length for i, length in enumerate((3, 1, 17, 30, 5, 9, 44))]
    llm.generate(prompts, [SamplingParams(max_tokens=6 + 3 * i) for i in range(len(prompts))])
    return piecewise_backend.report(llm)


def hybrid() -> Report:
    """Attention, linear attention and compressed attention, of which one cannot record a prefill."""
    runner = make_hybrid_runner("FULL", compiler="inductor")
    engine = Engine(runner, vocab_size=VOCAB)
    for i, length in enumerate((3, 12, 25, 1)):
        engine.add([1 + i] * length, SamplingParams(max_tokens=5 + 4 * i))
    while engine.has_work:
        engine.step()
    return piecewise_backend.report(runner)


SHOWN = ((llama, "report", False, 2), (hybrid, "report_piece", True, 3))
"""(run, name of its picture, dark, number of the step that is chosen)."""


def without_local_paths(page: Path) -> Path:
    """The same page with files named as seen from the project and from the installed packages."""
    text = page.read_text(encoding="utf-8")
    for folder in (*site.getsitepackages(), ROOT):
        text = text.replace(f"{folder}/", "")
    page.write_text(text, encoding="utf-8")
    return page


def picture(page: Page, source: Path, target: Path, *, dark: bool, step: int) -> None:
    """A picture of the saved report `source`, with the step number `step` chosen."""
    page.open(source, width=1280, height=960, dark=dark)
    page.click(".step", step)
    page.run("document.activeElement.blur(); scrollTo(0, 0)")
    page.driver.save_screenshot(str(target))


def main() -> None:
    """Make the pages, then the pictures."""
    if (why := why_no_browser()) is not None:
        sys.exit(f"no pictures: {why}")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    folder.mkdir(parents=True, exist_ok=True)
    with open_browser() as page, tempfile.TemporaryDirectory() as pages:
        for make, name, dark, step in SHOWN:
            source = without_local_paths(make().save(Path(pages) / f"{name}.html"))
            picture(page, source, folder / f"{name}.png", dark=dark, step=step)


if __name__ == "__main__":
    main()

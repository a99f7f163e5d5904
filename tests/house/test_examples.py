"""Run the examples: examples/*.py, and every block of code on these pages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pages.write import BLOCK
from scipy.stats import chisquare
from tree import ROOT

PAGES = {
    "README.md": "flash_sample",
    "docs/guide/sampling.md": "flash_sample",
    "docs/guide/filters-and-penalties.md": "truncated_sample",
    "docs/guide/screened-head.md": "screened_sample",
    "docs/guide/quantized-heads.md": "flash_sample",
    "docs/guide/speculation.md": "draft_sample",
    "docs/guide/log-probabilities.md": "score",
}
"""Page -> the function that it is about."""

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLOW = {"decode_loop", "minimal_kernel", "speculative_loop"}
"""Examples that decode a whole model, or need a process in which Triton is not imported yet."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SHORT = [str(path) for path in EXAMPLES if path.stem not in SLOW]
RUN_ALL = f"import runpy\nfor path in {SHORT}: runpy.run_path(path, run_name='__main__')"


def run(script: Path, device: str) -> str:
    """Return the output of a script in a new process; fail unless its exit code is 0.

    The process runs without the interpreter, which other tests turn on: on a CPU a user gets the
    reference.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("device", DEVICES)
def test_short_examples_run(device, tmp_path):
    """Run all of them in one process, as importing torch takes longer than they do."""
    script = tmp_path / "all.py"
    script.write_text(RUN_ALL, encoding="utf-8")
    assert run(script, device).count("kept") >= 3


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(SLOW))
def test_long_example_runs(name, device):
    assert run(ROOT / "examples" / f"{name}.py", device)


def without_generated_blocks(text: str) -> str:
    """Blank the generated blocks of a page, examples among them, and keep the line numbers."""
    return BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs(page, device, tmp_path):
    """Run the blocks in order, as one program; a traceback has the line numbers of the page."""
    text = without_generated_blocks((ROOT / page).read_text(encoding="utf-8"))
    lines = text.splitlines()
    program = [""] * len(lines)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        first = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        program[first : first + len(code)] = code
    imports = [line for line in program if line.startswith("from fsbench.kernels import")]
    assert any(PAGES[page] in line for line in imports)
    script = tmp_path / "page.py"
    script.write_text("\n".join(program), encoding="utf-8")
    run(script, device)


@pytest.mark.parametrize("device", DEVICES)
def test_minimal_kernel_draws_from_the_softmax(device):
    """Compare 1,600 draws with the softmax by a chi-square test, over two tiles of the vocabulary.

    A correct kernel fails with probability 1e-6; the seeds are fixed. Kernels without noise,
    without T, with equal noise in all rows or in both tiles were tried: their p-values are below.
    """
    spec = importlib.util.spec_from_file_location("m", ROOT / "examples" / "minimal_kernel.py")
    assert spec and spec.loader
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    B, D, V, T = 64, 16, 80, 0.7
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(V, D, generator=generator).to(device) / 8
    hidden = torch.randn(1, D, generator=generator).expand(B, D).contiguous().to(device)
    draws = torch.cat(
        [example.minimal_sample(hidden, weight, seed, temperature=T) for seed in range(25)]
    )
    expected = ((hidden[0] @ weight.T).double() / T).softmax(0).cpu().numpy() * len(draws)
    counts = torch.bincount(draws.cpu(), minlength=V).numpy()
    assert chisquare(counts, expected).pvalue > 1e-6

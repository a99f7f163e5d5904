"""The examples run: examples/ and every block of code on these pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
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


def run(script: Path, device: str) -> str:
    """Output of a script in a fresh process, as a user starts it; fails unless its exit code is 0.

    Without the interpreter, which other tests turn on: on a CPU a user gets the reference.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_example_runs(path, device):
    assert run(path, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_runs(page, device, tmp_path):
    """In order, as one program. Its lines keep their numbers, so a traceback points at the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
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

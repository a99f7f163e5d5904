"""Run the examples: examples/*.py, and every block of code on these pages."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch
from forked import failures, run_forked
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

SLOW = {"decode_loop", "minimal_kernel", "speculative_loop"}
"""Examples that decode a whole model, or whose kernel is slow in the interpreter."""
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def example_code(slow: bool) -> list[tuple[str, str]]:
    return [
        (str(path), path.read_text("utf-8")) for path in EXAMPLES if (path.stem in SLOW) == slow
    ]


def page_code(page: str) -> str:
    """Return the Python of a page as one program, with the line numbers of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)  # examples/*.py, among others
    program = [""] * len(text.splitlines())
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        first = text.count("\n", 0, block.start(1))
        code = block[1].splitlines()
        program[first : first + len(code)] = code
    imports = [line for line in program if line.startswith("from fsbench.kernels import")]
    assert any(PAGES[page] in line for line in imports)
    return "\n".join(program)


def run_all(scripts: list[tuple[str, str]], device: str) -> str:
    """Run scripts, each in a new process, and return their output; fail if one fails.

    The processes run without the interpreter, which other tests turn on: on a CPU a user gets the
    reference.
    """
    env = {"TRITON_INTERPRET": None, "HF_HUB_OFFLINE": "1"}  # nothing is downloaded
    if device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    outputs = run_forked(scripts, "import torch", env)
    assert not failures(scripts, outputs)
    return "".join(done.out for done in outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_short_examples_and_the_code_of_pages_run(device):
    out = run_all([*example_code(slow=False), *((page, page_code(page)) for page in PAGES)], device)
    assert out.count("kept") >= 3


@pytest.mark.full
@pytest.mark.parametrize("device", DEVICES)
def test_long_examples_run(device):
    assert run_all(example_code(slow=True), device)


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

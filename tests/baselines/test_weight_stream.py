"""The weight stream reads every element once, whatever V * D: its partial sums prove it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The interpreter is chosen when triton is imported, so each case runs in a process of its own;
# small integers make fp32 sums exact in any order.
SCRIPT = """
import torch
from fsbench.baselines import weight_stream
for V, D, programs in [(1, 1, 3), (127, 41, 3), (64, 512, 2), (257, 1000, 5)]:
    weight = torch.randint(-8, 9, (V, D)).to(torch.float16)
    partial = weight_stream.weight_stream(weight, torch.full((programs,), float("nan")))
    assert partial.sum().item() == weight.double().sum().item(), (V, D, programs)
"""


def test_sums_every_element() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

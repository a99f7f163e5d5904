"""Small launches of the fused kernels, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py --control

Shapes have a remainder in every dimension. memcheck is to report nothing; racecheck nothing but
what it reports for the control, which specializes warps and does nothing else (docs/kernel.md).
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels import describe, flash_sample


@gluon.jit
def _store(pointer, value):
    gl.store(pointer, value)


@gluon.jit
def _control_kernel(pointer):
    gl.warp_specialize([(_store, (pointer, 1)), (_store, (pointer + 1, 2))], [1], [24])
    if gl.atomic_add(pointer, 1) == 1:
        gl.store(pointer + 2, 3)


def control() -> None:
    """Specialize warps, then use the result of an atomic operation."""
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    _control_kernel[(1,)](out, num_warps=4)
    assert out.tolist() == [2, 2, 3]


def main() -> None:
    """Draw with both kernels, plainly and with every option."""
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    weight = torch.randn(3001, 264, device="cuda").bfloat16()
    for B in (3, 130):
        hidden = torch.randn(B, 264, device="cuda").bfloat16()
        row = torch.arange(B, device="cuda")
        everything = {
            "temperature": (row % 3) / 2.0,
            "bias": torch.zeros(B, 2999, device="cuda"),
            "mask": torch.full((B, 94), -1, dtype=torch.int32, device="cuda"),
            "seed": row,
            "offset": row,
            "num_samples": 2,
            "vocab_size": 2999,
            "return_logprob": True,
            "return_logz": True,
        }
        for kernel in ("auto", "portable"):
            for options in ({"seed": seed}, everything):
                sample = flash_sample(hidden, weight, kernel=kernel, **options)
                torch.cuda.synchronize()
                assert sample.valid.all()
        print(B, describe(hidden, weight))


if __name__ == "__main__":
    control() if "--control" in sys.argv else main()

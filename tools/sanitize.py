"""Small launches of the fused kernels, to be watched by compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py

Each tool is to report 0 errors (racecheck: 0 hazards). Shapes have a remainder in every dimension.
"""

from __future__ import annotations

import torch

from fsbench.kernels import describe, flash_sample


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
    main()

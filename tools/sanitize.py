"""Make small launches of every public kernel, also with undefined rows, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py --control
    compute-sanitizer --tool memcheck --report-api-errors no --target-processes all \\
        --kernel-name-exclude kernel_substring=nccl \\
        torchrun --nproc-per-node 2 tools/sanitize.py --sharded

Shapes have a remainder in every dimension. memcheck should report nothing, and racecheck nothing
but what it reports for the control, which only specializes warps (docs/design/kernels.md). NCCL
asks the driver for kernels that do not exist, and its kernels read past small buffers. Set
PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that memcheck knows where each tensor ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels import (
    Penalties,
    TokenHistory,
    VocabShard,
    flash_sample,
    prepare_head,
    screened_sample,
    truncated_sample,
)

D, ROWS, V = 264, 3001, 2999  # ROWS: of the weight, more than the V tokens
UNDEFINED = 7
"""Number of first rows with NaN, inf or huge hidden states, or with an invalid temperature."""


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


def inputs(B: int) -> tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]:
    """Return hidden, weight, the required arguments, and all that every call accepts."""
    generator = torch.Generator("cuda").manual_seed(B)
    hidden = torch.randn(B, D, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(ROWS, D, device="cuda", generator=generator).bfloat16()
    row = torch.arange(B, device="cuda")
    temperature = (row % 3) / 2.0
    hidden[:3].fill_diagonal_(torch.nan)
    hidden[1, 1], hidden[2, 2] = torch.inf, 2.0**51
    temperature[3:7] = torch.tensor([torch.nan, -1.0, torch.inf, 2.0**101])
    required = {"seed": row[:1] * 0, "temperature": temperature}
    everything = {
        "temperature": temperature,
        "bias": torch.zeros(B, V, device="cuda"),
        "mask": torch.full((B, 94), -1, dtype=torch.int32, device="cuda"),
        "seed": row,
        "offset": row,
        "vocab_size": V,
        "soft_cap": 30.0,
    }
    return hidden, weight, required, everything


def calls(B: int) -> Iterator[tuple[str, Any]]:
    """Yield (name, call) of every public function, without options and with all of them."""
    hidden, weight, required, everything = inputs(B)
    head = prepare_head(weight)
    history = TokenHistory.from_tokens([[1, 2]] * B, [[3]] * B, 8, "cuda")
    penalties = Penalties(history, 1.2, 0.1, 0.1)
    scores = {"return_logprob": True, "return_logz": True, "num_samples": 2}
    kept: dict[str, Any] = {f"return_{x}": True for x in ("logprob", "kept_logprob", "rank")}
    kept |= {"return_support": 41, "return_top": 20, "logprob_temperature": 1.0}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "flash_sample, hopper": (partial(flash_sample, hidden, weight, kernel="hopper"), scores),
        "flash_sample, portable": (
            partial(flash_sample, hidden, weight, kernel="portable"),
            scores,
        ),
        "flash_sample, token noise": (partial(flash_sample, hidden, weight, noise="token"), scores),
        "screened_sample": (partial(screened_sample, hidden, head), {}),
    }
    filters: dict[str, dict[str, Any]] = {
        "k = 20, p = 0.9": {"top_k": 20, "top_p": 0.9},
        "k = 900": {"top_k": 900},
        "p = 0.9": {"top_p": 0.9},
        "min-p = 0.1": {"min_p": 0.1},
        "penalties": {"top_k": 50, "penalties": penalties},
    }
    for name, options in filters.items():
        call = partial(truncated_sample, hidden, weight, **options)
        cases[f"truncated_sample, {name}"] = call, kept
    for name, (call, outputs) in cases.items():
        yield name, partial(call, **required)
        yield f"{name}, all options", partial(call, **everything, **outputs)


def check(name: str, call: Any) -> None:
    """Fail unless defined rows draw a token, and the others none or one that exists."""
    sample = call()
    torch.cuda.synchronize()
    assert sample.valid[UNDEFINED:].all(), name
    assert ((sample.tokens >= -1) & (sample.tokens < ROWS)).all(), name
    print(name, flush=True)


def sharded() -> None:
    """Draw on several ranks, each with its rows of the weight."""
    dist.init_process_group("cpu:gloo,cuda:nccl")  # objects by gloo, because NCCL reads past them
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for B in (9, 130):
        hidden, weight, required, everything = inputs(B)
        shard = VocabShard(weight.tensor_split(ranks)[rank].clone(), vocab_size=V)
        everything.pop("vocab_size")
        for kernel in ("hopper", "portable"):
            call = partial(flash_sample, hidden, shard, kernel=kernel)
            check(f"{kernel} {B}", partial(call, **required))
            check(f"{kernel} {B}, all options", partial(call, return_logprob=True, **everything))
    dist.destroy_process_group()


def main() -> None:
    """Make every call, at two batch sizes."""
    for B in (9, 130):
        for name, call in calls(B):
            check(f"B = {B}: {name}", call)


if __name__ == "__main__":
    {"--control": control, "--sharded": sharded}.get((*sys.argv, "")[1], main)()

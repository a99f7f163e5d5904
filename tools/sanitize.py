"""Small launches of every public kernel, with rows that have no draw, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py
    compute-sanitizer --tool racecheck python tools/sanitize.py --control
    compute-sanitizer --tool memcheck --report-api-errors no --target-processes all \\
        --kernel-name-exclude kernel_substring=nccl \\
        torchrun --nproc-per-node 2 tools/sanitize.py --sharded

Shapes have a remainder in every dimension. memcheck is to report nothing; racecheck nothing but
what it reports for the control, which specializes warps and does nothing else
(docs/design/kernels.md). NCCL asks the driver for kernels that are not there, and its own read past
small buffers. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that memcheck knows where each tensor ends.
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

D, ROWS, V = 264, 3001, 2999  # the weight has more rows than there are tokens
UNDEFINED = 7
"""The first rows: NaN, inf and far too large in hidden; then temperatures that are none."""


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
    """hidden, weight, the least a call needs, and all that every call takes."""
    generator = torch.Generator("cuda").manual_seed(B)
    hidden = torch.randn(B, D, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(ROWS, D, device="cuda", generator=generator).bfloat16()
    row = torch.arange(B, device="cuda")
    temperature = (row % 3) / 2.0
    for at, value in enumerate((float("nan"), float("inf"), 2.0**51)):
        hidden[at, at] = value
    for at, value in enumerate((float("nan"), -1.0, float("inf"), 2.0**101)):
        temperature[3 + at] = value
    least = {"seed": torch.zeros(1, dtype=torch.int64, device="cuda"), "temperature": temperature}
    everything = {
        "temperature": temperature,
        "bias": torch.zeros(B, V, device="cuda"),
        "mask": torch.full((B, 94), -1, dtype=torch.int32, device="cuda"),
        "seed": row,
        "offset": row,
        "vocab_size": V,
        "soft_cap": 30.0,
    }
    return hidden, weight, least, everything


def calls(B: int) -> Iterator[tuple[str, Any]]:
    """(name, call) of every public function, plainly and with every option."""
    hidden, weight, least, everything = inputs(B)
    scores = {"return_logprob": True, "return_logz": True, "num_samples": 2}
    for kernel in ("hopper", "portable"):
        call = partial(flash_sample, hidden, weight, kernel=kernel)
        yield f"flash_sample, {kernel}", partial(call, **least)
        yield f"flash_sample, {kernel}, all options", partial(call, **everything, **scores)
    yield "flash_sample, token noise", partial(flash_sample, hidden, weight, noise="token", **least)
    head = prepare_head(weight)
    yield "screened_sample", partial(screened_sample, hidden, head, **least)
    yield "screened_sample, all options", partial(screened_sample, hidden, head, **everything)
    history = TokenHistory.from_tokens([[1, 2]] * B, [[3]] * B, 8, "cuda")
    penalties = Penalties(history, repetition=1.2, presence=0.1, frequency=0.1)
    filters: dict[str, dict[str, Any]] = {
        "k = 20, p = 0.9": {"top_k": 20, "top_p": 0.9},
        "k = 900": {"top_k": 900},
        "p = 0.9": {"top_p": 0.9},
        "min-p = 0.1": {"min_p": 0.1},
        "penalties": {"top_k": 50, "penalties": penalties},
    }
    said: dict[str, Any] = {f"return_{x}": True for x in ("logprob", "kept_logprob", "rank")}
    said |= {"return_support": 41, "return_top": 20, "logprob_temperature": 1.0}
    for name, kept in filters.items():
        truncated = partial(truncated_sample, hidden, weight, **kept)
        yield f"truncated_sample, {name}", partial(truncated, **least)
        yield f"truncated_sample, {name}, all options", partial(truncated, **everything, **said)


def check(name: str, call: Any) -> None:
    """Rows that are well draw a token; those that are not draw none, or one that exists."""
    sample = call()
    torch.cuda.synchronize()
    assert sample.valid[UNDEFINED:].all(), name
    assert ((sample.tokens >= -1) & (sample.tokens < ROWS)).all(), name
    print(name, flush=True)


def sharded() -> None:
    """Draw on several ranks, each with its rows."""
    dist.init_process_group("cpu:gloo,cuda:nccl")  # objects go by gloo: NCCL reads past them
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for B in (9, 130):
        hidden, weight, least, everything = inputs(B)
        shard = VocabShard(weight.tensor_split(ranks)[rank].clone(), vocab_size=V)
        everything.pop("vocab_size")
        for kernel in ("hopper", "portable"):
            call = partial(flash_sample, hidden, shard, kernel=kernel)
            check(f"{kernel} {B}", partial(call, **least))
            check(f"{kernel} {B}, all options", partial(call, return_logprob=True, **everything))
    dist.destroy_process_group()


def main() -> None:
    """Make every call, at two batch sizes."""
    for B in (9, 130):
        for name, call in calls(B):
            check(f"B = {B}: {name}", call)


if __name__ == "__main__":
    {"--control": control, "--sharded": sharded}.get((*sys.argv, "")[1], main)()

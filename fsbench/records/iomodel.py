"""The I/O cost model of the paper (section 3.3): bytes, FLOPs, predicted speedup, floor time.

In elements, per decode step and GPU (V is the rank's shard ceil(V / tp) under tensor parallelism):

    M_baseline = V D + D B + 2 V B + B     read W and H, write and read the logits, write the tokens
    M_fused    = V D + D B + B             the same without the logits

    M_baseline / M_fused = 1 + 2 / (D/B + D/V + 1/V)  ~  1 + 2 B / D

Bytes are elements times the size of the problem's dtype, for the logits and the token ids too, so
that ratios of bytes are the paper's ratios of elements. Pure Python: no torch, no numpy.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fsbench.errors import unknown_name
from fsbench.problem import DTYPES, Problem


@dataclass(frozen=True)
class Traffic:
    """Least work of one decode step on one GPU: HBM bytes of each approach, FLOPs of both.

    one_byte: whether the weight has one byte a number. Matmuls of two such operands run at up to
        twice the bf16 rate.
    """

    baseline_bytes: int
    fused_bytes: int
    flops: int
    one_byte: bool = False


@dataclass(frozen=True)
class Roof:
    """Two ceilings of a GPU: HBM bandwidth (TB/s) and dense bf16 matmul rate (TFLOP/s)."""

    tb_per_s: float
    tflops: float
    source: str

    def floor_us(self, work: Traffic) -> float:
        """Least time of the fused step, microseconds.

        The bf16 rate bounds fp32 problems too: fp32 matmuls are never faster.
        """
        rate = self.tflops * (2 if work.one_byte else 1)
        return max(work.fused_bytes / self.tb_per_s, work.flops / rate) / 1e6


@dataclass(frozen=True)
class Gpu:
    """A GPU of peaks.toml: its datasheet roof, and the roof measured on one where known."""

    slug: str
    names: tuple[str, ...]  # patterns
    datasheet: Roof
    measured: Roof | None


def traffic(problem: Problem) -> Traffic:
    """Least HBM bytes of baseline and fused sampling, and the FLOPs of the matmul (2 B D V).

    A head that is quantized itself is read as it is.
    """
    size = DTYPES[problem.dtype]
    B, D, V = problem.B, problem.D, -(-problem.V // problem.tp)
    fused = size * (V * D + D * B + B) - ((size - 1) * V * D if problem.weights else 0)
    return Traffic(fused + size * 2 * V * B, fused, 2 * B * D * V, bool(problem.weights))


def predicted_speedup(problem: Problem) -> float:
    """M_baseline / M_fused: 1 + 2 / (D/B + D/V + 1/V), unless the head is quantized itself."""
    work = traffic(problem)
    return work.baseline_bytes / work.fused_bytes


def approximate_speedup(problem: Problem) -> float:
    """1 + 2 B / D, the full formula for D/V and 1/V near 0."""
    return 1 + 2 * problem.B / problem.D


def floor_us(problem: Problem, gpu_name: str) -> float | None:
    """Datasheet floor of a fused step, microseconds; None where the GPU's peaks are unknown.

    max(bytes / peak bandwidth, FLOPs / peak rate). `gpu_name` is a slug or the name NVML reports;
    '' (a CPU) has no floor.
    """
    gpu = find_gpu(gpu_name)
    return gpu.datasheet.floor_us(traffic(problem)) if gpu else None


@cache
def gpus() -> dict[str, Gpu]:
    """The GPUs of peaks.toml by slug."""
    text = (resources.files(__package__) / "peaks.toml").read_text()
    by_slug = {}
    for slug, entry in tomllib.loads(text).items():
        measured = entry.get("measured")
        by_slug[slug] = Gpu(
            slug=slug,
            names=tuple(entry["names"]),
            datasheet=Roof(entry["tb_per_s"], entry["bf16_tflops"], "datasheet"),
            measured=measured
            and Roof(measured["tb_per_s"], measured["bf16_tflops"], f"measured {measured['date']}"),
        )
    return by_slug


def find_gpu(name: str) -> Gpu | None:
    """The GPU with this slug, or with this whole name as NVML and CUDA report it, or None."""
    for each in gpus().values():
        patterns = (re.escape(each.slug), *each.names)
        if any(re.fullmatch(pattern, name, re.IGNORECASE) for pattern in patterns):
            return each
    return None


def gpu(name: str) -> Gpu:
    """The GPU with this slug or device name; an unknown one raises InvalidArgument."""
    gpu = find_gpu(name)
    if gpu is None:
        raise unknown_name("gpu", name, gpus())
    return gpu


def gpu_slug(name: str) -> str:
    """Return a GPU's name in folder and file names: 'h200' for 'NVIDIA H200'.

    A GPU without an entry in peaks.toml keeps its name, in lower case with dashes and without the
    vendor ('NVIDIA H100 PCIe' -> 'h100-pcie'). '' (a CPU) stays ''.
    """
    gpu = find_gpu(name)
    if gpu:
        return gpu.slug
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-").removeprefix("nvidia-")

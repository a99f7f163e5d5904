"""Presets of `fsbench run`: which problems, and how much effort. Samplers name their presets."""

from __future__ import annotations

from dataclasses import dataclass

from fsbench.errors import unknown_name

_PAPER_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SMALL = (4096, 151936)
_LARGE = (8192, 128256)


@dataclass(frozen=True)
class Preset:
    """shapes are (D, V); warmup and iters count per cell, iters in all rounds together.

    filters: of Problem, each a set of them; the empty one means none.
    """

    summary: str
    shapes: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    dtype: str = "bf16"
    warmup: int = 25
    iters: int = 100
    rounds: int = 5
    filters: tuple[dict[str, float], ...] = ({},)


PRESETS = {
    "paper": Preset(
        "both configurations of the paper, B 1..256, its four samplers and the lower bounds",
        (_SMALL, _LARGE),
        _PAPER_BATCHES,
    ),
    "lean": Preset(
        "the same problems against the leanest one can do without fusing",
        (_SMALL, _LARGE),
        _PAPER_BATCHES,
    ),
    "tp": Preset(
        "the larger configuration over several GPUs (--tp), as the paper's Table 6",
        (_LARGE,),
        (16, 64, 256),
        iters=500,
    ),
    "quick": Preset(
        "the smaller configuration, four batch sizes, the strongest rivals: minutes when cold",
        (_SMALL,),
        (1, 16, 64, 256),
        iters=50,
    ),
    "truncated": Preset(
        "the smaller configuration with top-k, top-p and min-p on, in a grid, and a mixed batch",
        (_SMALL,),
        (1, 4, 16, 64, 256),
        iters=30,
        rounds=3,
        filters=(
            *(
                {"top_k": k, "top_p": p, "min_p": min_p}
                for k in (1, 20, 50, 200, 1000)
                for p in (1.0, 0.95, 0.9, 0.5)
                for min_p in (0.0, 0.05)
            ),
            *({"top_p": p} for p in (0.95, 0.9, 0.5)),
            {"min_p": 0.05},
            {"top_k": 50, "top_p": 0.9, "mixed": True},
        ),
    ),
    "score": Preset(
        "log-probabilities of given tokens, no draws: rollouts' batches and trainers'",
        (_SMALL,),
        (1, 16, 64, 256, 1024, 4096, 16384),
        iters=30,
        rounds=3,
    ),
    "smoke": Preset(
        "does it run at all: one small problem", ((256, 8192),), (1, 8), "fp32", 2, 10, 2
    ),
    "cpu": Preset(
        "samplers that run on CPUs, on a small model's LM head (Qwen3-1.7B), fp32",
        ((2048, 151936),),
        (1, 4, 16),
        "fp32",
        warmup=2,
        iters=15,
        rounds=3,
    ),
}


def preset(name: str) -> Preset:
    """The named preset; an unknown name raises InvalidArgument with the nearest known one."""
    try:
        return PRESETS[name]
    except KeyError:
        raise unknown_name("preset", name, PRESETS) from None

"""Tile shapes of the FlashSampling kernel: the tuning space, and the shipped choice per GPU.

A choice depends on the GPU, the model's D and the bucket of B, never on the exact B, so nothing is
tuned while serving. Tokens do not depend on it (docs/noise.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from fsbench.errors import InvalidArgument


@dataclass(frozen=True)
class TileConfig:
    """One way to cut the problem. Sizes are powers of two.

    block_b, block_v, block_d: tile of batch rows, vocabulary rows (128 or 256: whole groups of
        tokens, and not more than share a first column) and hidden columns (16 to 256).
    slice: vocabulary columns whose token noise is in registers at once, 16 to 128.
    v_on_m: the vocabulary on the M side of the tensor-core instruction (small B), else the batch.
    flatten: let loads of the next tile start under the epilogue of this one.
    ctas_per_sm: persistent programs per multiprocessor.
    """

    block_b: int
    block_v: int
    block_d: int
    slice: int
    v_on_m: bool
    flatten: bool
    num_warps: int
    num_stages: int
    ctas_per_sm: int

    def __post_init__(self) -> None:
        for name, options in (
            ("block_b", (16, 32, 64, 128, 256)),
            ("block_v", (128, 256)),
            ("block_d", (16, 32, 64, 128, 256)),
            ("slice", (16, 32, 64, 128)),
            ("num_warps", (1, 2, 4, 8, 16)),
            ("num_stages", tuple(range(1, 17))),
            ("ctas_per_sm", tuple(range(1, 33))),
        ):
            if getattr(self, name) not in options:
                wanted = " or ".join(map(str, options))
                raise InvalidArgument(f"{name}: expected {wanted}; got {getattr(self, name)}")

    def shared_bytes(self, element_bytes: int) -> int:
        """Shared memory of the load pipeline of one program."""
        return (self.block_b + self.block_v) * self.block_d * element_bytes * self.num_stages

    def fitted(self, shared_limit: int, element_bytes: int) -> TileConfig:
        """This config with as many stages as fit `shared_limit` bytes per program (at least 1)."""
        config = self
        while config.num_stages > 1 and config.shared_bytes(element_bytes) > shared_limit:
            config = replace(config, num_stages=config.num_stages - 1)
        return config

    def __str__(self) -> str:
        return (
            f"b{self.block_b}v{self.block_v}d{self.block_d}s{self.slice}"
            f"{'M' if self.v_on_m else 'N'}{'f' if self.flatten else ''}"
            f"w{self.num_warps}p{self.num_stages}x{self.ctas_per_sm}"
        )


_HOPPER_SHARED = 225 * 1024  # 227 KiB less the barriers of the pipeline

BUCKETS = (16, 32, 64, 128, 256)
"""Upper ends of the buckets of B; a larger B uses the last bucket's config."""


def bucket(B: int) -> int:
    """The bucket a batch size belongs to."""
    return next((upper for upper in BUCKETS if upper >= B), BUCKETS[-1])


# First guesses for GPUs that nobody has tuned yet: small enough for 100 KiB of shared memory.
_UNTUNED = {
    16: TileConfig(16, 128, 64, 16, True, False, 4, 4, 2),
    32: TileConfig(32, 128, 64, 16, True, False, 4, 4, 2),
    64: TileConfig(64, 128, 64, 16, False, False, 8, 3, 1),
    128: TileConfig(128, 128, 64, 16, False, False, 8, 3, 1),
    256: TileConfig(128, 128, 64, 16, False, False, 8, 3, 1),
}

# Of 30 to 80 configs per bucket on an H200 the fastest with group noise, or within 0.5 % of it, by
# the geometric mean over the paper's two shapes (results/h200/tuning, by
# tools/tune_flash_sampling.py). Flattening the tile loop hides the epilogue.
_H200 = {
    16: TileConfig(16, 128, 128, 32, True, True, 4, 5, 1),
    32: TileConfig(32, 128, 128, 32, True, True, 4, 4, 1),
    64: TileConfig(64, 128, 128, 32, False, True, 8, 4, 1),
    128: TileConfig(128, 128, 128, 16, False, True, 8, 3, 1),
    256: TileConfig(128, 256, 64, 16, False, False, 8, 3, 1),
}

# Those that won with token noise, which takes seven times the instructions.
_H200_TOKEN = {
    **_H200,
    128: TileConfig(128, 128, 64, 16, False, False, 8, 6, 1),
    256: TileConfig(256, 128, 64, 16, False, False, 16, 4, 1),
}

# For D > 6144 the wider tile wins at B = 128 too: 530 against 537 us at D = 8192.
_H200_WIDE = {**_H200, 128: TileConfig(128, 256, 64, 16, False, True, 8, 4, 1)}
_WIDE = 6144

_TUNED = dict.fromkeys(("H200", "H100"), (_H200, _H200_WIDE, _H200_TOKEN))
"""By a part of the GPU's name. The H100 has the same multiprocessors and is untried here."""


def config_for(B: int, D: int, gpu_name: str, noise: str = "group") -> TileConfig:
    """The shipped config for a batch and hidden size, by the GPU's name as NVML gives it."""
    for name, (table, wide, token) in _TUNED.items():
        if name in gpu_name:
            if noise == "token":
                return token[bucket(B)]
            return (wide if D > _WIDE else table)[bucket(B)]
    return _UNTUNED[bucket(B)]


def space(B: int) -> list[TileConfig]:
    """The tuning space for one bucket of B: every config worth timing on a Hopper GPU."""
    upper = bucket(B)
    if upper <= 32:
        sizes = [
            (upper, v, d) for v, d in ((128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
        ]
        choices = product(sizes, (32,), (True,), (4, 8), (3, 4, 5, 6), (1, 2))
    elif upper == 64:
        sizes = [(64, v, d) for v, d in ((128, 64), (128, 128), (256, 64), (256, 128))]
        choices = product(sizes, (32,), (True, False), (4, 8), (3, 4, 5), (1, 2))
    elif upper == 128:
        sizes = [(128, 128, 64), (128, 128, 128), (128, 256, 64)]
        choices = product(sizes, (16,), (False,), (8, 16), (3, 4, 5, 6), (1, 2))
    else:
        sizes = [(256, 128, 64), (128, 256, 64), (128, 128, 64), (256, 128, 128)]
        choices = product(sizes, (16,), (False,), (8, 16), (3, 4, 5), (1, 2))
    found = []
    for (block_b, block_v, block_d), width, v_on_m, warps, stages, ctas in choices:
        for flatten in (False, True):
            config = TileConfig(
                block_b, block_v, block_d, width, v_on_m, flatten, warps, stages, ctas
            )
            accumulators = block_b * block_v // (32 * warps)
            registers = (accumulators + 40) * 32 * warps * ctas
            if config.shared_bytes(2) * ctas <= _HOPPER_SHARED and registers <= 65536:
                found.append(config)
    return found

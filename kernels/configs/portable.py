"""Tile shapes of the portable FlashSampling kernel, and the tuning space.

The choice (configs.tables) depends on the GPU, the model's D and the bucket of B, never on the
exact B, so nothing is tuned while serving. Tokens do not depend on it (docs/design/noise.md).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import product

from fsbench.errors import InvalidArgument


def check_options(config: object, **options: Collection[int]) -> None:
    """Check that each field of a config has one of its allowed values.

    Raises:
        InvalidArgument: A field has another value; the message names it.
    """
    for name, allowed in options.items():
        value = getattr(config, name)
        if value not in allowed:
            expected = " or ".join(map(str, allowed))
            raise InvalidArgument(f"{name}: expected {expected}; got {value}")


@dataclass(frozen=True)
class TileConfig:
    """Tile shapes of the portable kernel. Sizes are powers of two.

    Attributes:
        block_b, block_v, block_d: Batch rows, vocabulary rows and hidden columns of a tile. block_v
            is 128 or 256: whole groups of tokens, and not more than share a first column.
        slice: Vocabulary columns whose token noise is in registers at once.
        v_on_m: Whether the vocabulary is on the M side of the tensor-core instruction (small B),
            else the batch.
        flatten: Whether loads of the next tile start during the epilogue of this one.
        num_warps, num_stages: As in Triton.
        ctas_per_sm: Persistent programs per multiprocessor.
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
        check_options(
            self,
            block_b=(16, 32, 64, 128, 256),
            block_v=(128, 256),
            block_d=(16, 32, 64, 128, 256),
            slice=(16, 32, 64, 128),
            num_warps=(1, 2, 4, 8, 16),
            num_stages=range(1, 17),
            ctas_per_sm=range(1, 33),
        )

    def blocks(self, B: int) -> int:
        """Return the number of blocks of rows for B rows."""
        return -(-B // self.block_b)

    def shared_bytes(self, element_bytes: int) -> int:
        """Return the shared memory of a program in bytes: load pipeline and tile transposition.

        The two take turns, unless the loop is flattened: then loads continue during a
        transposition.

        Args:
            element_bytes: Bytes of a number of the weight. A number of hidden has at least 2.
        """
        transposed = 2 * self.block_b * self.block_v if self.flatten and self.v_on_m else 0
        hidden_bytes = max(element_bytes, 2)
        stage = (self.block_b * hidden_bytes + self.block_v * element_bytes) * self.block_d
        return stage * self.num_stages + transposed

    def most_registers(self) -> int:
        """Return the registers of a thread with which ctas_per_sm programs run at once."""
        return 65536 // (32 * self.num_warps * self.ctas_per_sm) // 8 * 8

    def fitted(self, shared_limit: int, element_bytes: int) -> TileConfig:
        """Return this config with the stages that fit `shared_limit` bytes of a program, or one."""
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


def bucket(B: int, buckets: tuple[int, ...] = BUCKETS) -> int:
    """Return the bucket of a batch size."""
    return next((upper for upper in buckets if upper >= B), buckets[-1])


def space(B: int, shared_limit: int = _HOPPER_SHARED) -> list[TileConfig]:
    """Return the tuning space of one bucket of B: the configs worth timing.

    Args:
        shared_limit: Bytes of shared memory of a multiprocessor; by default those of Hopper.
    """
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
    configs = []
    for (block_b, block_v, block_d), width, v_on_m, warps, stages, ctas in choices:
        for flatten in (False, True):
            config = TileConfig(
                block_b, block_v, block_d, width, v_on_m, flatten, warps, stages, ctas
            )
            accumulators = block_b * block_v // (32 * warps)
            registers = (accumulators + 40) * 32 * warps * ctas
            if config.shared_bytes(2) * ctas <= shared_limit and registers <= 65536:
                configs.append(config)
    return configs

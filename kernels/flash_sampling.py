"""FlashSampling: exact sampling fused into the LM-head matmul (Algorithm 1), portable Triton.

    token_b = argmax_v (hidden_b . weight_v + T g_bv),   g_bv i.i.d. Gumbel(0, 1)

is a draw from softmax(hidden_b @ weight.T / T). The maximum splits over vocabulary tiles, so the
noise is added to each tile of logits on chip and only the best candidate of a tile survives: the
[B, V] logits never reach memory. One launch; nothing but a few KiB of workspace.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels._device import launching_on, multiprocessors
from fsbench.kernels._flash_sampling_config import TileConfig, config_for
from fsbench.kernels._flash_sampling_kernel import flash_sampling_kernel
from fsbench.kernels._workspace import held_bytes, workspace
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Sample(NamedTuple):
    """tokens: int64 [B], -1 where not valid. valid: bool [B], False for a row that has no draw."""

    tokens: Tensor
    valid: Tensor


def flash_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float = 1.0,
    seed: Tensor,
    offset: Tensor,
    config: TileConfig | None = None,
) -> Sample:
    """Draw one token per row from softmax(hidden @ weight.T / temperature); logits stay on chip.

    Args:
        hidden: [B, D] bf16 or fp16, contiguous.
        weight: [V, D], like hidden. Rows of a multiple of 16 bytes are loaded by TMA where the GPU
            has it; others by pointers, more slowly.
        temperature: >= 0; 0 is greedy.
        seed: int64 [1] on the same device; all 64 bits count.
        offset: int64 [1] on the same device: the step, modulo 2^32. A captured graph reads both at
            each replay: advance offset in place to draw afresh.
        config: tile shapes; by default the shipped choice for this GPU, B and D. Tokens do not
            depend on it, up to rounding of the matmul.

    Returns:
        Sample(tokens, valid). A row with a NaN or +inf logit, or without a finite one, gets -1.

    Noise: token noise as fsbench.reference defines it, from (seed, offset, row, token) alone.
    Traffic: 2 D (V + B) bytes read, 9 B bytes written, and the workspace of
    fsbench.kernels._workspace. On CPU tensors it runs under TRITON_INTERPRET=1 only.

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device, layout
            or range; nothing has been launched.
    """
    _check(hidden, weight, temperature, seed, offset)
    import torch

    B, D = hidden.shape
    V = weight.shape[0]
    config = config or default_config(B, D, hidden.device, hidden.element_size())
    work = workspace(B, hidden.device)
    tokens = torch.empty(B, dtype=torch.int64, device=hidden.device)
    valid = torch.empty(B, dtype=torch.bool, device=hidden.device)
    use_tma = tma_possible(hidden) and tma_possible(weight)
    blocks_b = triton.cdiv(B, config.block_b)
    programs = multiprocessors(hidden.device) * config.ctas_per_sm
    blocks_v = max(1, min(programs // blocks_b, triton.cdiv(V, config.block_v)))
    with launching_on(hidden.device):
        flash_sampling_kernel[(blocks_b * blocks_v,)](
            _matrix(hidden, config.block_b, config.block_d, use_tma),
            _matrix(weight, config.block_v, config.block_d, use_tma),
            seed,
            offset,
            float(temperature),
            work.keys,
            work.arrivals,
            tokens,
            valid,
            B,
            V,
            D,
            BLOCK_B=config.block_b,
            BLOCK_V=config.block_v,
            BLOCK_D=config.block_d,
            SLICE=config.slice,
            V_ON_M=config.v_on_m,
            USE_TMA=use_tma,
            FLATTEN=config.flatten,
            ROTATE=config.rotate,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return Sample(tokens, valid)


def tma_possible(matrix: Tensor) -> bool:
    """Whether TMA can load it: base address and rows are multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.shape[1] * matrix.element_size() % 16 == 0


def default_config(B: int, D: int, device: torch.device, element_bytes: int) -> TileConfig:
    """The shipped tile shapes for [B, D] hidden states on a device, fitted to its shared memory."""
    import torch

    if device.type == "cpu":
        return TileConfig(16, 256, 64, 256, False, False, True, 4, 1, 1)
    properties = torch.cuda.get_device_properties(device)
    config = config_for(B, D, properties.name)
    limit = properties.shared_memory_per_block_optin // config.ctas_per_sm
    return config.fitted(limit - 1024, element_bytes)


def _matrix(matrix: Tensor, rows: int, cols: int, use_tma: bool) -> Tensor | TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, cols]) if use_tma else matrix


def _check(
    hidden: Tensor, weight: Tensor, temperature: float, seed: Tensor, offset: Tensor
) -> None:
    """Raise for any argument that flash_sample's contract excludes."""
    import torch

    interpreted = triton.knobs.runtime.interpret
    # The interpreter's dot is wrong for bf16 (triton 3.6.0), and fp32 is of use there only.
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.bfloat16, torch.float16)
    for name, value in (("hidden", hidden), ("weight", weight), ("seed", seed), ("offset", offset)):
        if not isinstance(value, torch.Tensor):
            raise InvalidType(f"{name}: expected a tensor; got {type(value).__name__}")
    if hidden.dtype not in dtypes:
        raise InvalidType(
            f"hidden: expected dtype {' or '.join(map(str, dtypes))}; got {hidden.dtype}"
        )
    if weight.dtype != hidden.dtype:
        raise InvalidType(f"weight: expected dtype {hidden.dtype} as hidden; got {weight.dtype}")
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise InvalidArgument(
                f"{name}: expected a non-empty matrix; got shape {tuple(matrix.shape)}"
            )
        if not matrix.is_contiguous():
            raise InvalidArgument(f"{name}: expected it contiguous; got strides {matrix.stride()}")
    if weight.shape[1] != hidden.shape[1]:
        raise InvalidArgument(
            f"weight: expected shape [V, {hidden.shape[1]}] as hidden; got {tuple(weight.shape)}"
        )
    if weight.shape[0] >= 2**31 - 16:
        raise InvalidArgument(f"weight: expected V below 2^31 - 16 rows; got {weight.shape[0]}")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise InvalidType(f"temperature: expected a number; got {type(temperature).__name__}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument(f"temperature: expected a finite number >= 0; got {temperature}")
    for name, scalar in (("seed", seed), ("offset", offset)):
        if scalar.dtype != torch.int64:
            raise InvalidType(f"{name}: expected dtype torch.int64; got {scalar.dtype}")
        if tuple(scalar.shape) != (1,):
            raise InvalidArgument(f"{name}: expected shape [1]; got {tuple(scalar.shape)}")
    for name, value in (("weight", weight), ("seed", seed), ("offset", offset)):
        if value.device != hidden.device:
            raise InvalidArgument(
                f"{name}: expected it on {hidden.device} as hidden; got {value.device}"
            )
    if hidden.device.type != "cuda" and not interpreted:
        raise InvalidArgument(
            f"hidden: expected a CUDA tensor (or TRITON_INTERPRET=1); got one on {hidden.device}"
        )


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider. The kernel is compiled, or loaded from Triton's cache, at the first launch."""
    return _FlashSampling(problem, weight)


class _FlashSampling:
    def __init__(self, problem: Problem, weight: Tensor):
        self._weight = weight
        self._temperature = problem.temperature
        self._tiles = default_config(problem.B, problem.D, weight.device, weight.element_size())
        self.config = f"{self._tiles} {'tma' if tma_possible(weight) else 'pointers'}"

    @property
    def shared_bytes(self) -> int:
        """Memory that outlives a launch and serves all of them: the workspaces."""
        return held_bytes(self._weight.device)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sample(
            hidden,
            self._weight,
            temperature=self._temperature,
            seed=seed,
            offset=offset,
            config=self._tiles,
        ).tokens


PROVIDER = Provider(
    name="flash_sampling",
    label="FlashSampling (Triton)",
    kind=Kind.EXACT,
    requires=("triton",),
    capabilities=Capabilities(noise="token", zero_temperature=True, fused=True),
    build=build,
    presets=("paper", "quick", "lean"),
)

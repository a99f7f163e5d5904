"""Parallel Group-Gumbel-Max over stored logits: a sample and a log-mass per group, then a group.

Algorithm I.2 of the FlashSampling paper, after a matmul that stores the logits; the paper computes
a group's logits on chip (fused, with groups of 32, that is flash_sampling). One program per
(row, group) finds the group's exact sample z_k, with token noise (docs/design/noise.md), and its
log-mass L_k = log sum exp(y / T). A second kernel draws the group by Gumbel-max on L_k (Lemma D.2),
with noise that tokens do not use, and returns z_k and log Z = log sum_k exp(L_k).

The kernels keep T L_k, not L_k: like a token's score it then takes T times the noise, and it is
finite at every temperature.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E
from fsbench.kernels.noise.contract import candidates, gumbel
from fsbench.kernels.noise.keys import LOWEST_KEY, token_of_key
from fsbench.kernels.providing.launches import noise_map
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor, padded

TOKENS_OF_GROUP = 1024
"""Tokens per group (the paper's g); a power of two, 16 or more."""
NUM_WARPS = 4

_CHOICE_STREAM = tl.constexpr(2 << 16)
"""Counter word 3 of the noise that chooses a group. Token noise has words below 2^16 there, the
noise of groups of 32 tokens (noise.group) 2^16 and up: no Philox block is shared."""
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _scaled_log_sum(x, scale):
    """Return scale * log sum exp(x / scale) of a block, fp32; -inf if all of it is -inf."""
    largest = tl.max(x)
    # Without a finite number subtract nothing: -inf - -inf would be NaN.
    shift = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp2((x - shift) * (LOG2_E / scale)))
    return shift + scale * (tl.log2(total) * _LN_2)


@triton.jit(do_not_specialize=["groups"])
def _local_sample_kernel(
    logits_ptr,  # [B, V]
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    scale,  # fp32, temperature, or 1 where that is 0
    keys_ptr,  # [B, groups] int64, out: the group's best candidate
    masses_ptr,  # [B, groups] fp32, out: scale * L_k; -inf, so never chosen, if it has no mass
    stride,  # of the rows of logits
    V,
    groups,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0) // groups
    v0 = tl.program_id(0) % groups * GROUP
    offs_v = v0 + tl.arange(0, GROUP)
    logits_ptr += row.to(tl.int64) * stride
    stored = tl.load(logits_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
    logits = stored.to(tl.float32)[None, :]

    rows = row + tl.zeros((1, 1), tl.int32)
    best = tl.full((1, GROUP // 4), LOWEST_KEY, tl.int64)
    seed, offset = tl.load(seed_ptr), tl.load(offset_ptr)
    best, _ = candidates(logits, v0, rows, seed, offset, temperature, 0, best)
    tl.store(keys_ptr + tl.program_id(0), tl.max(best))
    tl.store(masses_ptr + tl.program_id(0), _scaled_log_sum(logits, scale))


@triton.jit(do_not_specialize=["groups"])
def _sample_group_kernel(
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    scale,  # fp32, as above
    keys_ptr,  # [B, groups] int64
    masses_ptr,  # [B, groups] fp32
    tokens_ptr,  # [B] int64, out
    log_z_ptr,  # [B] fp32, out
    groups,
    BLOCK: tl.constexpr,  # >= groups
):
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    offs = row.to(tl.int64) * groups + k
    keys = tl.load(keys_ptr + offs, mask=k < groups, other=LOWEST_KEY)
    masses = tl.load(masses_ptr + offs, mask=k < groups, other=float("-inf"))
    offset = tl.load(offset_ptr).to(tl.int32)
    bits, _, _, _ = tl.philox(tl.load(seed_ptr), k, row, offset, _CHOICE_STREAM)
    chosen = tl.argmax(masses + temperature * gumbel(bits), axis=0)
    token = token_of_key(tl.max(tl.where(k == chosen, keys, LOWEST_KEY)))
    # The best candidate of all groups is the greedy token at T = 0, and -1 in an undefined row.
    best = token_of_key(tl.max(keys))
    token = tl.where((best >= 0) & (temperature > 0), token, best)
    log_z = tl.where(best >= 0, _scaled_log_sum(masses, scale) / scale, float("nan"))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_z_ptr + row, log_z)


def group_gumbel_parallel(
    logits: Tensor, seed: Tensor, offset: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of stored logits, from softmax(logits / temperature).

    Args:
        logits: [B, V] with contiguous rows, bf16, fp16 or fp32.
        seed, offset: int64 [1] on the same device: the key of the noise, and the step.
        temperature: >= 0; 0 is greedy, the lowest id among equal logits.

    Returns:
        tokens: int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one.
        log_z: fp32 [B], log sum exp(logits / T) in nats; of T = 1 where T = 0. NaN where the
            token is -1, +inf where fp32 cannot hold it.

    Shapes, dtypes and devices are not checked.
    """
    import torch

    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

    B, V = logits.shape
    groups = triton.cdiv(V, TOKENS_OF_GROUP)
    keys = logits.new_empty(B, groups, dtype=torch.int64)
    masses = logits.new_empty(B, groups, dtype=torch.float32)
    tokens, log_z = keys.new_empty(B), masses.new_empty(B)
    # In fp32, 1 / T is infinite for a smaller T.
    scale = max(float(temperature), 2.0**-126) if temperature > 0 else 1.0
    shared: dict[str, Any] = {
        "seed_ptr": seed,
        "offset_ptr": offset,
        "temperature": float(temperature),
        "scale": scale,
        "keys_ptr": keys,
        "masses_ptr": masses,
        "groups": groups,
        "num_warps": NUM_WARPS,
    }
    BLOCK = triton.next_power_of_2(groups)
    with launching_on(logits.device):
        bind_and_launch(
            _local_sample_kernel,
            (B * groups,),
            logits_ptr=logits,
            stride=logits.stride(0),
            V=V,
            GROUP=TOKENS_OF_GROUP,
            **shared,
        )
        results = {"tokens_ptr": tokens, "log_z_ptr": log_z}
        bind_and_launch(_sample_group_kernel, (B,), BLOCK=BLOCK, **results, **shared)
    return tokens, log_z


def build(problem: Problem, weight: Tensor) -> Launch:
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = (hidden @ weight.T)[:, : problem.V]
        tokens, _ = group_gumbel_parallel(logits, seed, offset, problem.temperature)
        return tokens

    return launch


PROVIDER = Provider(
    name="group_gumbel_parallel",
    label="cuBLAS + parallel Group-Gumbel-Max",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=Capabilities(dtypes=("bf16", "fp16", "fp32"), zero_temperature=True),
    build=build,
)

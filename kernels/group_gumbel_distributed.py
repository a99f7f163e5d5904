"""Distributed Group-Gumbel-Max in one process: one log-mass and one sample per shard, merged.

Algorithm I.4 of the FlashSampling paper without its ranks: nothing is sent. A rank of a
tensor-parallel LM head would compute (L_k, z_k) for every row from its rows of the weight and send
these two numbers, not logits; `merge` then draws the rank by Gumbel-max on L_k (Lemma D.2), and the
rank's sample is the row's token. flash_sampling_gather does this over several GPUs.
"""

from __future__ import annotations

from fsbench.kernels.providing.local_sample import local_sample
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor

SHARDS = 8
"""Simulated ranks (the paper's n). Sizes differ by at most one row; shards without a row, if
V < SHARDS, are skipped."""


def merge(log_masses: Tensor, samples: Tensor, greedy: bool = False) -> Tensor:
    """Choose a shard for each row and return its sample: the last step of a rank, after the gather.

    Args:
        log_masses: floating [K, B], L_k of each shard; -inf for a shard without mass in a row, NaN
            or +inf for one with a NaN or +inf logit. float64 is best: differences decide.
        samples: int64 [K, B], the shards' samples as token ids of the whole vocabulary.
        greedy: take the shard of the largest log-mass, for T = 0, where log-masses are the shards'
            largest logits. Of equal ones the first: the lowest id, if shards are in the order of
            their token ids.

    Returns:
        int64 [B]: samples[k, b], with probability exp(L_kb) / sum_j exp(L_jb); -1 for a row with
        a NaN or +inf log-mass, or with no finite one.

    Raises:
        RuntimeError, IndexError: torch's own, if shapes do not match or K = 0.

    Noise comes from torch's generator of the device. If each rank calls this, all must draw the
    same noise; otherwise one rank must send the result to the others.
    """
    import torch

    scores = log_masses
    if not greedy:
        scores = log_masses - torch.empty_like(log_masses).exponential_().log_()
    tokens = samples.gather(0, scores.argmax(0, keepdim=True))[0]
    undefined = ~log_masses.amax(0).isfinite()  # the maximum of NaN and numbers is NaN
    return tokens.masked_fill_(undefined, -1)


def group_gumbel_distributed(
    hidden: Tensor, shards: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Draw one token per row from softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [B, D], the same on every rank.
        shards: [V_k, D] each, consecutive rows of the weight, of any sizes, one of them not empty;
            hidden's dtype and device.
        temperature: >= 0; 0 is greedy, the lowest id among equal logits.

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit, or without a finite one.

    Raises:
        RuntimeError: torch's own, if shapes, dtypes or devices do not match, or all are empty.

    Noise comes from torch's generator of the device.
    """
    import torch

    log_masses, samples, first = [], [], 0
    for shard in shards:
        if len(shard):
            log_mass, sample = local_sample(hidden @ shard.T, temperature)
            log_masses.append(log_mass)
            samples.append(first + sample)
        first += len(shard)
    return merge(torch.stack(log_masses), torch.stack(samples), greedy=temperature == 0)


def build(problem: Problem, weight: Tensor) -> Launch:
    shards = weight.tensor_split(SHARDS)  # views

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return group_gumbel_distributed(hidden, shards, problem.temperature)

    return launch


PROVIDER = Provider(
    name="group_gumbel_distributed",
    label="Group-Gumbel-Max over 8 shards (torch)",
    kind=Kind.EXACT,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        zero_temperature=True,
        fused=True,
        exact_to_gap=14.0,  # of torch's exponential: docs/design/exactness.md
    ),
    build=build,
)

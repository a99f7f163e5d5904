"""Online Group-Gumbel-Max over vocabulary chunks, in plain torch: O(chunk) working memory.

Algorithm I.3 of the FlashSampling paper. Per row only the log-mass of the tokens seen so far and
one sample from them are kept. A chunk with log-mass L_k and local sample z_k is merged by the
binary rule of Lemma D.3: the sample becomes z_k with probability

    exp(L_k) / (exp(L) + exp(L_k)) = sigmoid(L_k - L),

and L becomes log(exp(L) + exp(L_k)). Unlike the running maximum of flash_sampling_online, this
keeps no score, and computes the normalizer, too.

The paper draws z_k after the choice, and only in rows that replace. Here every row draws it:
otherwise the host would have to read the choices. The draw in a chunk is an exponential race.
"""

from __future__ import annotations

from fsbench.kernels.providing.local_sample import local_sample
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor

TOKENS_AT_ONCE = 8192
"""Vocabulary rows per step (the paper's g); the last chunk is shorter."""


def group_gumbel_online(
    hidden: Tensor, weight: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [B, D]; weight: [V, D], the same floating dtype and device.
        temperature: >= 0; 0 is greedy, the lowest id among equal logits.

    Returns:
        tokens: int64 [B]; -1 for a row with a NaN or +inf logit, or without a finite one.
        log_z: float64 [B], log sum exp(logits / T); at T = 0 the largest logit, the limit of
            T log Z. NaN where the token is -1.

    Raises:
        RuntimeError: torch's own, if shapes, dtypes or devices of hidden and weight do not match.

    Noise comes from torch's generator of the device.
    """
    import torch

    B, V = hidden.shape[0], weight.shape[0]
    log_mass = torch.full((B,), -torch.inf, dtype=torch.float64, device=hidden.device)
    token = torch.full((B,), -1, dtype=torch.int64, device=hidden.device)
    for v0 in range(0, V, TOKENS_AT_ONCE):
        # A log-mass of NaN or +inf never becomes finite again, so undefined rows stay undefined.
        chunk_mass, sample = local_sample(hidden @ weight[v0 : v0 + TOKENS_AT_ONCE].T, temperature)
        if temperature == 0:
            replace = chunk_mass > log_mass
            log_mass = torch.maximum(log_mass, chunk_mass)
        else:
            # A chunk of mass 0 replaces nothing (rand is never below 0, and no number is below
            # NaN); the first one with mass always replaces (rand is below 1).
            replace = torch.rand_like(log_mass) < torch.sigmoid(chunk_mass - log_mass)
            log_mass = torch.logaddexp(log_mass, chunk_mass)
        token = torch.where(replace, v0 + sample, token)
    undefined = ~log_mass.isfinite()
    return token.masked_fill_(undefined, -1), log_mass.masked_fill_(undefined, torch.nan)


def build(problem: Problem, weight: Tensor) -> Launch:
    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        tokens, _ = group_gumbel_online(hidden, weight, problem.temperature)
        return tokens

    return launch


PROVIDER = Provider(
    name="group_gumbel_online",
    label="Group-Gumbel-Max online (torch)",
    kind=Kind.EXACT,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        zero_temperature=True,
        fused=True,
        exact_to_gap=14.0,  # of torch's exponential: docs/design/exactness.md
    ),
    build=build,
    presets=("cpu",),
)

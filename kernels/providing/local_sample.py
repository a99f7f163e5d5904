"""The log-mass of a group of tokens and an exact sample from it, for Group-Gumbel-Max in torch.

Section D.1 of the FlashSampling paper: a row's softmax factorizes into the choice of a group k, in
proportion to exp(L_k), and the choice of a token within it. So (L_k, z_k) is sufficient to combine
a group with the others.
"""

from __future__ import annotations

from fsbench.provider import Tensor


def local_sample(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-mass L, sample z) of a group of tokens, for every row.

    Args:
        logits: [B, W], W >= 1, floating; not changed.
        temperature: >= 0; 0 is greedy.

    Returns:
        L: float64 [B], log sum exp(logits / T); at T = 0 the largest logit, which is the limit of
            T L. -inf for a row of zero mass (no logit is above -inf), NaN or +inf for one with a
            NaN or +inf logit; the sum or maximum over groups then shows whether a row has a draw.
        z: int64 [B], a column drawn from softmax(logits / T); at T = 0 the first of the largest.
            Undefined where L is not finite.

    Noise comes from torch's generator of the device: an exponential race, which is Gumbel-max on
    the weights of L (argmax y / T + g = argmax exp(y / T) / E, g = -log E).

    L is float64 because merging takes differences: near y / T = 10^4 the fp32 numbers are 0.001
    apart, and the odds of two groups would have an error as large.
    """
    import torch

    logits = logits.float()
    largest = logits.amax(1)
    if temperature == 0:
        return largest.double(), logits.argmax(1)
    # A smaller temperature is 0 in fp32, and 0 / T would be NaN.
    temperature = max(temperature, torch.finfo(torch.float32).tiny)
    # At zero mass nothing is subtracted: every weight is then 0, and L is -inf.
    shift = torch.where(largest > -torch.inf, largest, 0.0)
    weights = (logits - shift[:, None]).div_(temperature).exp_()
    log_mass = largest.double() / temperature + weights.sum(1).double().log()
    return log_mass, weights.div_(torch.empty_like(weights).exponential_()).argmax(1)

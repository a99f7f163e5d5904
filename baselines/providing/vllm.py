"""vLLM's own sampler on stored logits, as its model runner V2 calls it (written for 0.26.0).

The requests of a problem are added to a `Sampler` of vLLM in `build`, as they are when they arrive;
a launch is the matmul and `Sampler.sample`, with all that is skipped when no request asks for it.
The temperature is applied to the logits in place, in the model's dtype: in bf16 logits / T are
rounded to 8 bits once more.

Noise of the Gumbel kernel: a key from a request's seed and the position of its token, then one word
for each token of the vocabulary. An engine draws seeds when requests arrive, and gathers positions
in every step. Here the seeds are those of the rows, and one small kernel makes the position of
fsbench's seed and step, so that both count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Launch, padded

if TYPE_CHECKING:
    from torch import Tensor

STRIDE = 0x1E3779B97F4A7C15
"""Between the positions of two of fsbench's seeds."""

ABLE: dict[str, Any] = {
    "zero_temperature": True,
    "per_row_temperature": True,
    "greedy_rows": True,
    "per_request_seed": True,
    "filters": FILTERS,
    "mixed_filters": True,
    "ties": "any",  # of the kth and its equals all are kept by a sort, exactly k by Triton
}
"""Capabilities of either way through it."""


def drawing(
    requests: Sequence[dict[str, Any]], seeds: Any, V: int, device: Any, flashinfer: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function (logits [B, V], positions int64 [B]) -> tokens [B].

    It is vLLM's Sampler with these requests: arguments of SamplingParams, and int64 seeds [B].
    flashinfer: filters go to FlashInfer, as in vLLM unless VLLM_USE_FLASHINFER_SAMPLER is 0.
    """
    import numpy as np
    import torch

    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it is said below, per sampler
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    B = len(requests)
    states = RequestState(B, 8, B, 0, V, device)
    sampler = Sampler(B, V, device, states)
    sampler.use_flashinfer = flashinfer
    for row, request in enumerate(requests):
        sampler.add_request(row, 1, SamplingParams(**request))
    sampler.sampling_states.seeds.np[:B] = seeds  # not by SamplingParams: FlashInfer refuses seeds
    sampler.apply_staged_writes()
    rows = torch.arange(B, dtype=torch.int32, device=device)
    rows_np = np.arange(B, dtype=np.int32)
    zeros = torch.zeros(B, dtype=torch.int32, device=device)  # input ids, and places in drafts
    return lambda logits, positions: sampler.sample(
        logits, rows, rows_np, positions, zeros, zeros, return_logprobs=False
    )[0]


def build_with(problem: Problem, weight: Tensor, flashinfer: bool) -> Launch:
    import numpy as np
    import torch

    B, V, device, T = problem.B, problem.V, weight.device, problem.temperature
    requests = [
        {"temperature": T, "top_k": k or -1, "top_p": p, "min_p": min_p}
        for k, p, min_p in problem.row_filters()
    ]
    seeds = np.random.SeedSequence(B).generate_state(B, np.uint64).view(np.int64)
    draw = drawing(requests, seeds, V, device, flashinfer)
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        position = torch.add(offset, seed, alpha=STRIDE).expand(B)
        return draw(matmul_logits(hidden, weight, V), position)

    return launch


def sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    seed: Tensor,
    offset: Tensor,
    temperature: float | Tensor = 1.0,
) -> SimpleNamespace:
    """The full call, with the Gumbel kernel: its noise is that of seed and position alone.

    vLLM tells log-probabilities of softmax(logits) or of what it drew from behind all filters, not
    those of softmax(logits / T), so none are claimed here.
    """
    import torch

    B, V, device = len(hidden), len(weight), weight.device
    T = torch.as_tensor(temperature, dtype=torch.float32).expand(B).tolist()
    requests = [{"temperature": own} for own in T]
    seeds = seed.expand(B) + (0 if len(seed) == B else torch.arange(B, device=device) * STRIDE)
    draw = drawing(requests, seeds.cpu().numpy(), V, device, flashinfer=False)
    logits = matmul_logits(hidden, weight, V).contiguous()
    return SimpleNamespace(tokens=draw(logits, offset.expand(B)))

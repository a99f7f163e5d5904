"""FlashSampling with top-k, top-p and min-p: it draws from all tokens, and again what is cut off.

Section D.6 of the FlashSampling paper shows that filters can be applied to the candidates of tiles;
for k = 50 that would keep more bytes of candidates than of logits. Here the fused kernel draws its
token and writes each logit once, with the largest of every 32. What then looks at the logits reads
only what can be kept (truncated.look): the draw stands if the filters keep it, else
the kept tokens race.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.filters import filters_of, penalties_of
from fsbench.kernels.providing.launches import WorkspaceLaunch, noise_map
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Capabilities, Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.call.result import TruncatedSample


def unsupported_reason(problem: Problem) -> str | None:
    """See Provider."""
    from fsbench.kernels.checks.values import MAX_V

    return f"takes V up to {MAX_V}, not {problem.V}" if problem.V > MAX_V else None


class _TopkTopp(WorkspaceLaunch):
    def __init__(self, problem: Problem, weight: Tensor):
        super().__init__(problem, weight)
        self._filters = filters_of(problem, weight.device)
        self._penalties = penalties_of(problem, weight.device)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.truncated.api import truncated_sample

        return truncated_sample(
            hidden,
            self._weight,
            temperature=self._temperature,
            penalties=self._penalties,
            seed=seed,
            offset=offset,
            **self._filters,
        ).tokens


def sample(hidden: Tensor, weight: Tensor, **options: Any) -> TruncatedSample:
    """See Provider."""
    from fsbench.kernels.truncated.api import truncated_sample

    return truncated_sample(hidden, weight, **options)


PROVIDER = Provider(
    name="flash_sampling_topk_topp",
    label="FlashSampling, top-k/top-p/min-p",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=Capabilities(
        noise="group",
        zero_temperature=True,
        host_sync_free=True,
        batch_invariant=True,
        per_row_temperature=True,
        greedy_rows=True,
        bias=True,
        mask=True,
        per_request_seed=True,
        logprob=True,
        rank=True,
        filters=FILTERS,
        mixed_filters=True,
        penalties=True,
    ),
    noise_map=noise_map,
    supports=unsupported_reason,
    build=_TopkTopp,
    sample=sample,
    call="truncated_sample",
    presets=("truncated",),
)

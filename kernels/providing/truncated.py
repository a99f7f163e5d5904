"""What the samplers of truncated_sample share as providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.providing.filters import filters_of, penalties_of
from fsbench.kernels.providing.launches import WorkspaceLaunch, empty_hidden
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Capabilities

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.launch.heads import PreparedHead

CAPABILITIES = Capabilities(
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
)
"""What truncated_sample can do, by default."""


def unsupported_reason(problem: Problem) -> str | None:
    """See Provider."""
    from fsbench.kernels.checks.values import MAX_V

    return f"takes V up to {MAX_V}, not {problem.V}" if problem.V > MAX_V else None


class TruncatedLaunch(WorkspaceLaunch):
    """truncated_sample with the problem's filters and penalties.

    screened: from a ScreenedHead, which is made here.
    """

    def __init__(self, problem: Problem, weight: Tensor, screened: bool = False):
        super().__init__(problem, weight)
        self._head: Tensor | PreparedHead = weight
        self._filters = filters_of(problem, weight.device)
        self._penalties = penalties_of(problem, weight.device)
        if screened:
            from fsbench.kernels.fused.api import describe
            from fsbench.kernels.screened.head import prepare_head

            self._head = prepare_head(weight)
            hidden, top_k = empty_hidden(problem, weight.device), self._filters["top_k"]
            self.config = describe(hidden, self._head, top_k=top_k)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.truncated.api import truncated_sample

        return truncated_sample(
            hidden,
            self._head,
            temperature=self._temperature,
            penalties=self._penalties,
            seed=seed,
            offset=offset,
            **self._filters,
        ).tokens

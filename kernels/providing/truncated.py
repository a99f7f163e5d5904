"""Launches and capabilities of the samplers of truncated_sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.filters import filters_of, penalties_of
from fsbench.kernels.providing.launches import CallLaunch, empty_hidden
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Capabilities, Tensor

if TYPE_CHECKING:
    from fsbench.kernels.launch.result import TruncatedSample

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
"""Capabilities of truncated_sample with its defaults."""


def unsupported_reason(problem: Problem) -> str | None:
    """Return why a problem is not supported, or None."""
    from fsbench.kernels.checks.values import MAX_V

    return f"takes V up to {MAX_V}, not {problem.V}" if problem.V > MAX_V else None


def sample(
    hidden: Tensor, weight: Tensor, screened: bool = False, **options: Any
) -> TruncatedSample:
    """Call truncated_sample; with `screened`, from a head that is prepared at every call."""
    from fsbench.kernels.screened.head import prepare_head
    from fsbench.kernels.truncated.api import truncated_sample

    return truncated_sample(hidden, prepare_head(weight) if screened else weight, **options)


class TruncatedLaunch(CallLaunch):
    """truncated_sample with the problem's filters and penalties.

    Args:
        screened: Whether to draw from a ScreenedHead, which is made here.
        options: Of truncated_sample, in place of the problem's or in addition.
    """

    def __init__(self, problem: Problem, weight: Tensor, screened: bool = False, **options: Any):
        from fsbench.kernels.fused.api import describe
        from fsbench.kernels.screened.head import prepare_head
        from fsbench.kernels.truncated.api import truncated_sample

        device = weight.device
        options = filters_of(problem, device) | options
        options["penalties"] = penalties_of(problem, device)
        head = prepare_head(weight) if screened else weight
        super().__init__(truncated_sample, problem, head, **options)
        self.config = describe(empty_hidden(problem, device), head, top_k=options["top_k"])

"""`ScreenedHead` and `prepare_head`: a weight with its int8 copy, for any sampling call."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.kernels import screened
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.screen_choice import (
    default_configs,
    filter_configs,
    worth_filtering,
    worth_screening,
)
from fsbench.kernels.launch.heads import PreparedHead
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, Screened, TruncatedSample
from fsbench.kernels.screened.draw import carry_out
from fsbench.kernels.screened.int8_copy import HeadCopy, check_copy, check_weight


class ScreenedHead(HeadCopy, PreparedHead):
    """A weight and its int8 copy, from prepare_head or load_head; the fields are HeadCopy's."""

    def validate(self) -> None:
        check_copy(self)

    def choice(
        self,
        hidden: Tensor,
        vocab_size: int,
        top_k: int | Tensor | None = None,
        all_greedy: bool = False,
    ) -> tuple[str | None, str]:
        """Return the kernel and the reason, as PreparedHead.choice does, from what was measured."""
        B, D = hidden.shape
        if top_k is None:
            chosen, reason = worth_screening(B, vocab_size, D, hidden.device, all_greedy)
            config: object = default_configs(B, D, hidden.device)[0]
        else:
            runs = runs_kernels(hidden.device, hidden.dtype)
            chosen, reason = worth_filtering(B, vocab_size, top_k, hidden.device, runs)
            config = filter_configs(B, D, hidden.device)[0]
        return f"screened {config}" if chosen else None, reason

    def draw(self, request: Request, out: Sample) -> None:
        num_exact = torch.empty(len(out.tokens), dtype=torch.int32, device=out.tokens.device)
        carry_out(request, self, None, Screened(out.tokens, out.valid, found=num_exact))

    @torch.no_grad()
    def draw_filtered(self, request: Request, filters: Filters, out: TruncatedSample) -> None:
        screened.filters.launch(request, self, filters, out)


def prepare_head(weight: Tensor) -> ScreenedHead:
    """Make the int8 copy of weight [V, D] on its device.

    A scale is the row's largest entry divided by 127. The bounds hold for the values that the
    weight has now: after a change, call the head's `refresh`. The copy has no gradient.

    Raises:
        InvalidType: `weight` is not a matrix of bf16, fp16 or fp32.
        InvalidArgument: `weight` is empty, not contiguous, or has more than 131,072 columns.
    """
    check_weight(weight)
    V, D = weight.shape
    head = ScreenedHead(
        weight,
        torch.empty(V, D, dtype=torch.int8, device=weight.device),
        *(torch.empty(V, dtype=torch.float32, device=weight.device) for _ in range(3)),
    )
    head.refresh()
    return head

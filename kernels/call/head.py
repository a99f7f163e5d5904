"""`PreparedHead`: a weight with something made from it, that flash_sample takes in its place."""

from __future__ import annotations

from torch import Tensor

from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Sample


class PreparedHead:
    """What a family of kernels keeps beside a weight, and whether it serves a request by it.

    flash_sample knows no more of such a family than this.
    """

    weight: Tensor

    def validate(self) -> None:
        """Refuse a head whose parts do not fit each other, or whose weight has changed.

        Raises:
            InvalidType, InvalidArgument: it is one.
        """
        raise NotImplementedError

    def choice(self, hidden: Tensor, vocab_size: int, noise: str) -> tuple[str | None, str]:
        """(what would draw, as `describe` names it; or None for the fused kernel, and why)."""
        raise NotImplementedError

    def draw(self, request: Request, out: Sample) -> None:
        """Draw one token for each row, and nothing else, into `out`."""
        raise NotImplementedError

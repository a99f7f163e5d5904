"""torch.ops.fsbench.screened_sample: a screened draw, at once or as an operator.

The head is named by its key, as an operator takes tensors and numbers only; so each call of a
compiled program still finds out whether the head's weight has changed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsbench.kernels.checks.values import ScreenConfigs
from fsbench.kernels.launch.operator import as_operator, is_traced
from fsbench.kernels.launch.request import Request
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.screened.copied import HeadCopy, check_copy
from fsbench.kernels.screened.draw import draw


def carry_out(
    request: Request, head: HeadCopy, configs: ScreenConfigs | None, out: Screened
) -> None:
    """Draw what a checked request asks for into `out`, as an operator if torch traces."""
    if not is_traced(request.hidden):
        draw(request, head, configs, out)
        return
    screen, resolve = configs or (None, None)
    of_call = {"head": head, "screen": screen, "resolve": resolve}
    assert out.found is not None
    screened_sample_op(
        {**dict(zip(Request._fields, request, strict=True)), **of_call},
        {"tokens": out.tokens, "valid": out.valid, "found": out.found},
    )


def _draw_values(values: dict[str, Any], results: dict[str, Tensor]) -> None:
    """Draw, as the operator has the request: see carry_out."""
    head, screen, resolve = (values.pop(name, None) for name in ("head", "screen", "resolve"))
    request = Request(**{**dict.fromkeys(Request._fields), **values})
    configs = None if screen is None else (screen, resolve)
    draw(request, check_copy(head), configs, Screened(**results))


screened_sample_op = as_operator("screened_sample", _draw_values)

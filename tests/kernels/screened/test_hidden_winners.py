"""Winners that the int8 copy or the rounding of hidden hides are still drawn.

Each is a candidate because of one term of the bounds, and would be lost without that term.
"""

from __future__ import annotations

import pytest
import torch

from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.bounds import screen_hidden, screen_logits
from fsbench.kernels.screened.head import prepare_head

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = [
    pytest.param(torch.bfloat16, id="torch"),
    pytest.param(torch.float32, id="kernels", marks=pytest.mark.interpreter),
]


def test_a_winner_that_its_codes_hide_is_found_by_the_residual():
    """The copy alone would draw token 18: its bound is all that keeps 17 in the race."""
    D, V = 256, 400
    weight = torch.randn(V, D, generator=torch.Generator().manual_seed(2))
    head = prepare_head(weight)
    copy = head.scale[:, None] * head.codes
    error = weight[17] - copy[17]
    hidden = (30 * error / error.norm() + 30 * weight[17] / weight[17].norm())[None, :]
    of_copy, of_error = float(copy[17] @ hidden[0]), float(error @ hidden[0])
    weight[18] = copy[17] * (1 + of_error / (2 * of_copy))
    head = prepare_head(weight)
    logits = hidden @ weight.T
    z, bound = screen_logits(head, screen_hidden(hidden))
    assert logits.argmax() == 17 and z.argmax() == 18
    assert z[0, 18] - z[0, 17] > 0.1 * bound[0, 17]
    options = {"seed": torch.tensor([0]), "temperature": 0.0}
    assert screened_sample(hidden, head, **options).tokens[0] == 17


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize(
    ("entries", "part", "codes"),
    [
        ([0.00389, 0.00389, 0.00395], "high", [127, 0, 0, 1]),
        # In steps: two of 0.4 that are rounded to 0, against one of 0.6 that is rounded to 1.
        ([0.4 / 32_512, 0.4 / 32_512, 0.6 / 32_512], "low", [0, 0, 0, 1]),
    ],
    ids=["high bytes, found by the low ones", "rounding, found by spread"],
)
def test_a_winner_that_codes_of_hidden_hide_is_found(entries, part, codes, dtype):
    """The copy is exact, and this part of hidden alone would draw token 1."""
    hidden = torch.zeros(1, 16)
    hidden[0, :4] = torch.tensor([1.0, *entries])
    weight = torch.zeros(128, 16)
    weight[:, 0] = 127
    weight[0, 1] = weight[0, 2] = weight[1, 3] = 127
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    assert getattr(screen_hidden(hidden), part)[0, :4].tolist() == codes
    options = {"seed": torch.tensor([0]), "temperature": 0.0}
    assert screened_sample(hidden, prepare_head(weight), **options).tokens[0] == 0


def test_lower_bounds_leave_a_winner_in_whose_rival_is_overrated():
    """Hidden lies along the error of token 17, and against that of 18."""
    D, V = 256, 128
    draw = torch.Generator().manual_seed(2)
    weight = torch.randn(V, D, generator=draw) * 0.01
    weight[17], weight[18] = torch.randn(2, D, generator=draw)
    head = prepare_head(weight)
    errors = (weight - head.scale[:, None] * head.codes)[17:19]
    hidden = 30 * (errors[0] / errors[0].norm() - errors[1] / errors[1].norm())
    # Orthogonal parts that lift both tokens, 17 a little more.
    others = torch.linalg.lstsq(
        torch.cat([weight[17:19], errors]), torch.tensor([100.2, 100.0, 0.0, 0.0])[:, None]
        - torch.cat([weight[17:19], torch.zeros(2, D)]) @ hidden[:, None],
    ).solution[:, 0]  # fmt: skip
    hidden = (hidden + others)[None, :]
    z, bound = screen_logits(head, screen_hidden(hidden))
    logits = hidden @ weight.T
    assert logits.argmax() == 17
    # A screen that took z for a lower bound would lose it.
    assert z[0, 18] > z[0, 17] + bound[0, 17]
    options = {"seed": torch.tensor([0]), "temperature": torch.zeros(1)}
    assert screened_sample(hidden, head, **options).tokens[0] == 17

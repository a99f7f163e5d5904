"""Lists that a close bound of one token shortens: the same tokens, and fewer exact logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_sample_cases import loose_problem
from torch import Tensor

from fsbench.kernels.configs.screen_choice import default_configs, resolve_config
from fsbench.kernels.fused.api import flash_sample
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import prepare_head

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

B, V, D = 5, 3000, 48


def drawn(hidden: Tensor, weight: Tensor, led_from: int | None, **options: object) -> Screened:
    screen, resolve = default_configs(B, D, torch.device("cpu"))
    configs = replace(screen, room=64, row_room=4096), replace(resolve, led_from=led_from)
    return screened_sample(hidden, prepare_head(weight), configs=configs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.0},
        {"temperature": torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0]), "seed": torch.arange(B)},
        {"soft_cap": 4.0},
        {"bias": torch.linspace(-3, 3, V)},
        {"bias": torch.full((B, V), -torch.inf).scatter(1, torch.arange(2 * B).view(B, 2), 1.0)},
    ],
    ids=["plain", "greedy", "per row", "soft cap", "bias", "bias that forbids"],
)
def test_shorter_lists_leave_the_tokens_of_the_weight(options):
    hidden, weight = loose_problem(B, V, D, 17.0)
    options = {"seed": torch.tensor([3]), "offset": torch.tensor([1])} | options
    expected = flash_sample(hidden, weight, noise="token", **options)
    long, short = (drawn(hidden, weight, led_from, **options) for led_from in (None, 0))
    assert long.tokens.tolist() == short.tokens.tolist() == expected.tokens.tolist()
    assert long.found is not None and short.found is not None
    assert (short.found >= 1).all() and (short.found <= long.found).all()


def test_one_close_bound_leaves_few_of_a_list_that_is_read_in_parts():
    hidden, weight = loose_problem(B, V, D, 28.0)
    for step in range(4):
        options = {"seed": torch.tensor([3]), "offset": torch.tensor([step]), "temperature": 0.1}
        expected = flash_sample(hidden, weight, noise="token", **options)
        long, short = (drawn(hidden, weight, led_from, **options) for led_from in (None, 0))
        assert long.tokens.tolist() == short.tokens.tolist() == expected.tokens.tolist()
        assert long.found is not None and short.found is not None
        assert int(long.found.max()) > 1024  # entries that leaders.shorten_lists reads at once
        assert (2 * short.found < long.found).all(), (short.found, long.found)


def test_short_lists_stay_as_they_are():
    hidden, weight = loose_problem(B, V, D, 17.0)
    options = {"seed": torch.tensor([3]), "temperature": 0.1}
    never, short_of_it = (drawn(hidden, weight, led_from, **options) for led_from in (None, 1))
    assert never.found is not None and short_of_it.found is not None
    assert never.found.tolist() == short_of_it.found.tolist()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 2.0**60])
def test_a_row_without_bounds_has_no_leader(value):
    hidden, weight = loose_problem(B, V, D, 17.0)
    hidden[2, 1] = value
    options = {"seed": torch.tensor([3])}
    expected = flash_sample(hidden, weight, noise="token", **options)
    sample = drawn(hidden, weight, 0, **options)
    assert sample.tokens.tolist() == expected.tokens.tolist()
    assert sample.found is not None and int(sample.found[2]) in (-1, V)


@pytest.mark.parametrize("entry", [torch.nan, torch.inf])
def test_a_token_without_a_bound_is_no_leader_and_may_win(entry):
    hidden, weight = loose_problem(B, V, D, 17.0)
    weight[17, 3] = entry
    options = {"seed": torch.tensor([3]), "temperature": 0.1}
    expected = flash_sample(hidden, weight, noise="token", **options)
    long, short = (drawn(hidden, weight, led_from, **options) for led_from in (None, 0))
    assert long.tokens.tolist() == short.tokens.tolist() == expected.tokens.tolist()
    assert long.found is not None and short.found is not None
    assert (2 * short.found < long.found).all(), (short.found, long.found)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {}, {"soft_cap": 30.0}, {"bias": torch.linspace(-3, 3, V)}],
    ids=["greedy", "noise", "soft cap", "bias"],
)  # fmt: skip
def test_the_bound_of_a_leader_is_not_above_its_score(options):
    """The copy is exact and bounds are narrow: a higher bound would leave no token at all."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(B, D, generator=generator)
    weight = torch.randint(-126, 127, (V, D), generator=generator).float() / 256
    weight[:, 0] = 127 / 256
    assert not prepare_head(weight).residual.gt(1e-3).any()
    for step in range(4):
        drawing = {"seed": torch.tensor([3]), "offset": torch.tensor([step])} | options
        expected = flash_sample(hidden, weight, noise="token", **drawing)
        sample = drawn(hidden, weight, 0, **drawing)
        assert sample.tokens.tolist() == expected.tokens.tolist()
        assert sample.found is not None and (sample.found >= 1).all()


def test_17_to_32_rows_of_few_columns_keep_the_form_without_shorter_lists():
    assert {resolve_config(B, 4096).led_from for B in (17, 32)} == {None}
    assert None not in {
        resolve_config(*size).led_from for size in ((16, 4096), (33, 4096), (32, 8192))
    }

"""One-pass Gumbel argmax over stored logits, in the interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch

from fsbench import reference
from fsbench.kernels.providing import one_pass as module

pytestmark = pytest.mark.interpreter


SEED = torch.tensor([-7])


def draw(logits: torch.Tensor, step: int, temperature: float) -> torch.Tensor:
    return module.gumbel_argmax(logits, SEED, torch.tensor([step]), temperature)


def assert_draws_what_it_should(logits, step, temperature):
    expected = reference.expect(logits, SEED, torch.tensor([step]), temperature, "group")
    assert draw(logits, step, temperature).tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize(("B", "V", "dtype"), [
    (1, 1, torch.float16), (3, 129, torch.float32), (2, 4096, torch.float16),
    (4, 5003, torch.float32),
])  # fmt: skip
def test_tokens_are_the_oracles(B, V, dtype, temperature):
    logits = 2 * torch.randn(B, V, generator=torch.Generator().manual_seed(V))
    for step in range(2):
        assert_draws_what_it_should(logits.to(dtype), step, temperature)


@pytest.mark.parametrize("temperature", [1e-40, 1e-36])
def test_a_temperature_too_small_to_divide_by_is_zero(temperature):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2))
    assert draw(logits, 0, temperature).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("values", [(-0.0, 0.0, -1e-45), (1e-30, 1.0000001e-30, 9.999999e-31)])
def test_greedy_rows_take_the_lowest_token_of_the_largest_logit(values):
    drawn = torch.randint(0, 3, (4, 300), generator=torch.Generator().manual_seed(2))
    logits = torch.tensor(values)[drawn]
    assert draw(logits, 0, 0.0).tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("programs", [1, 3])
def test_programs_share_a_row_in_any_number(programs, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 128)
    monkeypatch.setattr(module, "PROGRAMS_PER_MULTIPROCESSOR", programs)
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(1))
    logits[1, 1499], logits[2], logits[4, 0] = torch.nan, -torch.inf, torch.inf
    assert_draws_what_it_should(logits, 2, 1.0)

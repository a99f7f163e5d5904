"""No launch reads or writes outside its tensors, not even for undefined rows.

screened/test_padding.py has the same test of the screened sampler.
"""

from __future__ import annotations

import pytest
import torch
from memory_watch import within_tensors
from tiers import full
from truncated_cases import history

from fsbench.kernels import Penalties, flash_sample, score, truncated_sample

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

B, V = 5, 530
EVERYTHING = {
    "temperature": torch.tensor([1.0, torch.nan, -1.0, 2.0**110, torch.inf]),
    "bias": torch.cat([torch.linspace(-2, 2, 4 * V), torch.full((V,), torch.nan)]).view(B, V),
    "mask": torch.full((B, 17), -1, dtype=torch.int32),  # also bits beyond the vocabulary
    "soft_cap": 5.0,
    "seed": torch.arange(B),
    "offset": torch.arange(B),
}


def undefined(D: int) -> dict[str, torch.Tensor]:
    """Return matrices whose rows, except for the first, are undefined or huge."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(B, D, generator=draw), torch.randn(V, D, generator=draw)
    hidden[1], hidden[2, 0], hidden[3, 1], hidden[4] = torch.nan, torch.inf, torch.nan, 2.0**51
    weight[7, 3] = torch.inf
    return {"hidden": hidden, "weight": weight, "seed": torch.tensor([3])}


@pytest.mark.parametrize("D", [32, full(30)])  # by TMA, and not
@pytest.mark.parametrize(
    "options",
    [
        full({"noise": "token"}),
        full({"temperature": 0.0}),
        {"noise": "group", **EVERYTHING, "num_samples": 3},
        full({"noise": "token", **EVERYTHING, "num_samples": 3}),
    ],
    ids=["token", "greedy", "everything", "everything, token"],
)
def test_flash_sample(D, options):
    with within_tensors() as launches:
        sample = flash_sample(**{**undefined(D), **options}, **RETURNED)
    assert any(launches) and not sample.valid[1:].any()


RETURNED = {
    **dict.fromkeys(("return_logprob", "return_logz", "return_entropy", "return_rank"), True),
    "return_top": 20,
}


def test_score():
    call = {**undefined(30), **EVERYTHING}
    del call["seed"], call["offset"]
    targets = torch.tensor([0, V - 1, V, -1, -100, 2**31 + 1, 2**62, -(2**63)]).repeat(B, 1)
    with within_tensors() as launches:
        scores = score(targets=targets, return_entropy=True, return_rank=True, **call)
    assert any(launches)
    assert scores.valid[0].tolist() == [True, True, False, False, True, False, False, False]
    assert scores.valid[1:].sum() == B - 1  # -100 is ignored


@pytest.mark.parametrize(
    "options",
    [
        full({"top_k": 40, "top_p": 0.9}),
        full({"top_p": 0.5, "min_p": 0.1}),
        {
            "top_k": torch.tensor([0, 1, 40, 529, 2**31 - 1], dtype=torch.int32),
            "top_p": torch.tensor([1.0, 0.5, torch.nan, 0.0, 2.0]),
            "min_p": torch.tensor([0.0, 0.1, torch.nan, -1.0, 2.0]),
            "penalties": Penalties(history(B, V), repetition=1.2, presence=0.5),
            **EVERYTHING,
        },
    ],
    ids=["top-k", "top-p", "everything"],
)
def test_truncated_sample(options):
    outputs = dict.fromkeys(("return_logprob", "return_kept_logprob", "return_rank"), True)
    with within_tensors() as launches:
        truncated_sample(
            **{**undefined(32), **options}, **outputs, return_support=41, return_top=20
        )
    assert any(launches)

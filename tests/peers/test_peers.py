"""The reference and the kernels against cases of the public tests of seven peers."""

from __future__ import annotations

import math

import pytest
import torch
from flash_sample_cases import stored
from peer_cases import KEPT, VLLM, Kept, Penalized, Preferred, penalties

from fsbench import reference
from fsbench.kernels import Penalties, TokenHistory, truncated_sample

pytestmark = pytest.mark.usefixtures("one_thread")


def test_there_are_a_hundred_cases_of_seven_peers():
    assert len(KEPT) + len(VLLM) + len(penalties()) >= 100
    peers = {case.source.split()[0] for case in [*KEPT, *penalties()]} | {"vLLM"}
    assert len(peers) == 7


@pytest.mark.parametrize("case", KEPT, ids=lambda case: case.source)
def test_the_reference_keeps_what_the_peer_keeps(case: Kept):
    for T in [case.filters.get("temperature", 1.0)]:
        filters = {name: x for name, x in case.filters.items() if name != "temperature"}
        for rows in (filters, {name: torch.tensor([x]) for name, x in filters.items()}):
            kept = reference.truncate(case.logits[None], T, **rows, order=case.order).kept[0]
            assert kept.nonzero()[:, 0].tolist() == case.tokens


def as_ours(case: Kept) -> bool:
    """Return whether the peer's order keeps the tokens of truncated_sample: min-p is first."""
    stages = [name for name in case.order if name in case.filters and name != "temperature"]
    return "top_p" not in stages[:-1]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [case for case in KEPT if as_ours(case) and len(case.logits) <= 256],
    ids=lambda case: case.source,
)
def test_the_kernels_keep_what_the_peer_keeps(case: Kept):
    logits = case.logits.expand(2, -1).contiguous()
    seed = torch.tensor([3])
    for filters in (
        case.filters,
        {
            name: torch.full((2,), x, dtype=torch.int32 if name == "top_k" else torch.float32)
            for name, x in case.filters.items()
        },
    ):
        sample = truncated_sample(
            **stored(logits), seed=seed, **filters, return_support=256, return_kept=True
        )
        assert sample.kept.tolist() == [len(case.tokens)] * 2
        for row in sample.support:
            assert sorted(row[row >= 0].tolist()) == case.tokens
        assert all(int(token) in case.tokens for token in sample.tokens)


def changed(case: Penalized) -> torch.Tensor:
    """Return the log-probabilities [V] under the case's penalties, by truncated_sample."""
    history = TokenHistory.from_tokens([case.prompt], [case.output], 16, "cpu")
    sample = truncated_sample(
        **stored(case.logits[None]), seed=torch.tensor([3]),
        penalties=Penalties(history, **case.amounts), return_top=len(case.logits),
    )  # fmt: skip
    return sample.top_logprob[0][sample.top_tokens[0].argsort()]


@pytest.mark.interpreter
@pytest.mark.parametrize("case", penalties(), ids=lambda case: case.source)
def test_penalties_are_the_peers(case: Penalized):
    expected = torch.tensor(case.expected)
    if not case.of_softmax:
        expected = expected.softmax(0)
    V = len(case.logits)
    seen, counts = (reference.token_counts([ids], V) for ids in (case.prompt, case.output))
    by_reference = reference.penalized(case.logits[None], seen, counts, **case.amounts)[0]
    tolerance = 1e-3 if case.of_softmax else 1e-6
    assert torch.allclose(by_reference.softmax(0), expected, atol=tolerance)
    if not case.of_softmax:
        assert torch.allclose(by_reference, torch.tensor(case.expected))
    assert torch.allclose(changed(case).exp(), expected, atol=tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", VLLM, ids=lambda case: case.name)
def test_penalties_prefer_what_vllms_prefer(case: Preferred):
    roles = ["new", "prompt", "once", "thrice"] * 3
    tokens = {role: [v for v, r in enumerate(roles) if r == role] for role in set(roles)}
    output = tokens["once"] + tokens["thrice"] * 3
    logits = torch.full((12,), 1e-2)
    logp = changed(Penalized("vLLM", logits, tokens["prompt"], output, case.amounts, []))
    for value, expected in ((logp.max(), case.largest), (logp.min(), case.least)):
        near = {roles[v] for v in range(12) if math.isclose(logp[v], value, abs_tol=1e-6)}
        assert near == expected

"""Each launch that stores a row's token stores its validity, too."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import SEED, normal_logits

from fsbench import reference
from fsbench.kernels.device.stored_logits import StoredLogits, largest_of_groups, stride_for
from fsbench.kernels.launch.request import Filters, checked_request
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.truncated.launch import finish

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(("before", "valid"), [(1e30, False), (torch.nan, True)])
@pytest.mark.parametrize(
    "filters", [{"top_p": [0.9, 0.85]}, {"top_p": [0.9, 0.3], "top_k": [0, 3]}]
)
def test_rows_without_a_draw_from_all_tokens(filters, before, valid):
    """The screened head makes such rows; `valid` and the memory before the logits are poisoned."""
    B, V = 2, 5003
    stride = stride_for(V)
    memory = torch.full((stride + B * stride,), before)
    logits = memory[stride:].view(B, stride)
    logits[:] = -torch.inf
    logits[:, :V] = normal_logits(B, V)
    numbers = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    numbers |= {
        n: torch.tensor(x, dtype=torch.int32 if n == "top_k" else torch.float32)
        for n, x in filters.items()
    }
    off = dict.fromkeys(("offset", "soft_cap", "bias", "mask"))
    request = checked_request(
        torch.zeros(B, 16), torch.zeros(V, 16), seed=SEED, temperature=1.0, vocab_size=V,
        noise="token", **off,
    )  # fmt: skip
    tokens = torch.full((B,), -1, dtype=torch.int64)
    sample = TruncatedSample(tokens, torch.full((B,), valid))
    stored = StoredLogits(logits, largest_of_groups(logits))
    finish(request, stored, Filters(**numbers), None, sample)
    y = logits[:, :V]
    kept = reference.truncate(y, 1.0, **numbers)
    expected = reference.expect(y, SEED, request.steps(), 1.0, "token", truncation=kept)
    assert sample.tokens.tolist() == expected.tokens.tolist()
    assert sample.valid.tolist() == [True, True]

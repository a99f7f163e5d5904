"""Logits that a CPU computes for the reference."""

import pytest
import torch

from fsbench.kernels.launch.request import checked_request, raw_logits


@pytest.mark.parametrize("B", [1, 3])
def test_converting_a_weight_in_parts_gives_the_logits_of_converting_it_at_once(B):
    D, V = 1024, 2500  # more numbers than are converted at once, and a last part of another size
    generator = torch.Generator().manual_seed(B)
    hidden = torch.randn(B, D, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(V, D, generator=generator).bfloat16())
    seed = torch.zeros(1, dtype=torch.int64)
    request = checked_request(
        hidden, weight, seed=seed, offset=None, temperature=1.0, soft_cap=None, bias=None,
        mask=None, vocab_size=None, noise="token",
    )  # fmt: skip
    expected = hidden.double() @ weight.detach().double().T
    torch.testing.assert_close(raw_logits(request), expected.float(), rtol=1e-5, atol=1e-4)

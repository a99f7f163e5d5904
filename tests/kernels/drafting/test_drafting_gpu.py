"""draft_sample and verify_drafts on a GPU: the reference's tokens, also from a graph, no wait."""

from __future__ import annotations

import pytest
import torch

from fsbench import reference
from fsbench.kernels import (
    draft_sample,
    prepare_draft_vocabulary,
    prepare_head,
    step_noise,
    verify_drafts,
)

pytestmark = pytest.mark.gpu

B, D, V, ROWS = 16, 256, 128_256, 32_000


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}])
@pytest.mark.parametrize("screened", [False, True])
def test_eager_and_graph_give_the_references_tokens(filters, screened):
    if screened and filters:
        pytest.skip("a ScreenedHead takes no filters")
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(B, D, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(ROWS, D, generator=generator, device="cuda").bfloat16() / 6
    ids = torch.randperm(V, generator=generator, device="cuda")[:ROWS]
    vocabulary = prepare_draft_vocabulary(ids, V)
    head = prepare_head(weight) if screened else weight
    seed = torch.arange(B, device="cuda") * 0x0123456789ABCD - 7
    offset = torch.arange(B, device="cuda")
    T = torch.linspace(0, 1.5, B, device="cuda")
    mask = torch.rand(B, V, generator=generator, device="cuda") < 0.8

    def launch():
        return draft_sample(
            hidden, head, vocabulary, temperature=T, mask=mask, seed=seed, offset=offset, **filters
        )

    def require_accepted(tokens):
        logits = torch.full((B, V), -torch.inf, device="cuda")
        logits[:, ids] = hidden.float() @ weight.float().T
        logits.masked_fill_(~mask, -torch.inf)
        error = reference.matmul_error(hidden, weight)
        kept = reference.truncate(logits, T, logits_error=error, **filters)
        expected = reference.expect(
            logits, seed, offset, T, "token", logits_error=error, truncation=kept
        )
        assert expected.accepts(tokens).all()

    require_accepted(launch().tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample = launch()
    offset += 5
    graph.replay()
    require_accepted(sample.tokens)
    assert torch.equal(sample.tokens, launch().tokens)


def test_a_tree_is_verified_in_a_graph_without_a_wait():
    k = 8
    generator = torch.Generator("cuda").manual_seed(1)
    sampled = torch.randint(4, (B, k + 1), generator=generator, device="cuda")
    drafts = torch.randint(-1, 4, (B, k), generator=generator, device="cuda")
    parents = torch.tensor([0, 0, 1, 1, 2, 3, 6, 7], device="cuda")
    seed = position = torch.arange(B, device="cuda")
    expected = verify_drafts(sampled.cpu(), drafts.cpu(), parents.cpu(), vocab_size=4)
    noise = step_noise(seed.cpu(), position.cpu(), k, parents.cpu())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        verify_drafts(sampled, drafts, parents, vocab_size=4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verified = verify_drafts(sampled, drafts, parents, vocab_size=4)
        row_noise = step_noise(seed, position, k, parents)
    graph.replay()
    for one, other in zip((*verified, *row_noise), (*expected, *noise), strict=True):
        assert torch.equal(one.cpu(), other)

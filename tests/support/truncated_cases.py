"""Calls of truncated_sample in the interpreter, held against the oracle."""

from __future__ import annotations

import torch
from flash_sample_cases import (
    SEED,
    counter,
    exact_logits,
    guarded_memory,
    logits_error,
)

from fsbench import reference
from fsbench.kernels import TokenHistory, truncated_sample

FILTERS = ("top_k", "top_p", "min_p")


def check(
    *,
    temperature=1.0,
    seed=SEED,
    offset=None,
    penalties=None,
    noise="group",
    config=None,
    counting_only=False,
    **arguments,
):
    """Call truncated_sample; its tokens must be the oracle's, its counts those of the reference.

    Without counting it ends earlier, and must draw the same; counting_only leaves that out.
    """
    filters = {name: arguments.pop(name) for name in FILTERS if name in arguments}
    call = {"temperature": temperature, "seed": seed, "offset": offset, "penalties": penalties}
    call["noise"] = noise
    with guarded_memory():
        sample = truncated_sample(**arguments, **call, **filters, config=config, return_kept=True)
        if not counting_only:
            plain = truncated_sample(**arguments, **call, **filters, config=config)
            assert plain.kept is None and torch.equal(plain.tokens, sample.tokens)
            assert torch.equal(plain.valid, sample.valid)
    logits, error = exact_logits(**arguments), logits_error(**arguments)
    if penalties is not None:
        counts = penalties.history.dense(logits.shape[1])
        logits = reference.penalized(
            logits.float(), *counts, **dict(zip(penalties._fields[1:], penalties[1:], strict=True))
        ).double()
        error += 1e-6 * float(logits.nan_to_num(0, 0, 0).abs().max())
    kept = reference.truncate(logits, temperature, **filters, logits_error=error)
    step = counter(0) if offset is None else offset
    noise = noise if penalties is None else "token"
    expected = reference.expect(
        logits, seed, step, temperature, noise, truncation=kept, logits_error=error
    )
    wrong = ~expected.accepts(sample.tokens)
    assert not wrong.any(), differing("token", wrong, sample.tokens, expected.tokens)
    assert torch.equal(sample.valid, sample.tokens >= 0)
    require_kept(sample.kept, kept)
    return sample


def require_kept(n: torch.Tensor, bounds: reference.Truncation) -> None:
    """Fail unless the kernel keeps n [B] tokens, within what rounding leaves of the reference."""
    for label, bound, wrong in (
        ("number of kept tokens, too few", bounds.surely.sum(1), n < bounds.surely.sum(1)),
        ("number of kept tokens, too many", bounds.possibly.sum(1), n > bounds.possibly.sum(1)),
    ):
        assert not wrong.any(), differing(label, wrong, n, bound)


def differing(label: str, wrong: torch.Tensor, kernel: torch.Tensor, expected: torch.Tensor) -> str:
    """Say which rows of `wrong` [B] differ, and which number is whose."""
    rows = wrong.nonzero()[:, 0].tolist()
    return (
        f"{label} of rows {rows}: the kernel has {kernel[rows].tolist()}, "
        f"fsbench.reference {expected[rows].tolist()}"
    )


def history(B: int, V: int, capacity: int = 80) -> TokenHistory:
    generator = torch.Generator().manual_seed(B + V)
    prompts, outputs = (
        [torch.randint(0, V, (n,), generator=generator).tolist() for n in range(B)]
        for _ in range(2)
    )
    outputs[-1] += outputs[-1] * 2  # several times
    return TokenHistory.from_tokens(prompts, outputs, capacity, "cpu")

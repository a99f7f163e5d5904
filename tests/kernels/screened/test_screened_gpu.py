"""The screened sampler and its filters on a GPU: the tokens of the weight with token noise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels import (
    ScreenedHead,
    flash_sample,
    prepare_head,
    screened_sample,
    truncated_sample,
)
from fsbench.kernels.launch.result import Screened, TruncatedSample
from fsbench.kernels.noise.contract import gumbel
from fsbench.kernels.screened.bounds import screen_hidden, screen_logits
from fsbench.kernels.screened.exact_logits import exact_logits
from fsbench.kernels.screened.score_bounds import rough_gumbel

pytestmark = pytest.mark.gpu

CALLS = {
    "plain": (screened_sample, flash_sample, {}),
    "filtered": (truncated_sample, truncated_sample, {"top_k": 20, "top_p": 0.95}),
}
"""Calls with a head, the calls with its weight that have the same tokens, and options of both."""
each_call = pytest.mark.parametrize("call", CALLS)


def matrices(
    B: int, D: int, V: int, sigma: float = 3.0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(B + D + V)
    hidden = torch.randn(B, D, device="cuda") * sigma / D**0.5
    return hidden.to(dtype), torch.randn(V, D, device="cuda", dtype=dtype)


def on_device(seed: int) -> Tensor:
    return torch.tensor([seed], device="cuda")


def assert_same(
    call: str, hidden: Tensor, weight: Tensor, steps: int = 1, **options: object
) -> Screened | TruncatedSample:
    """Draw `steps` times from a head; the tokens must be those of its weight with token noise."""
    sampler, of_weight, filters = CALLS[call]
    offset, head = on_device(2**33 + 5), prepare_head(weight)
    options = {"seed": on_device(7), "offset": offset, **filters, **options}
    for _ in range(steps):
        sample = sampler(hidden, head, **options)
        expected = of_weight(hidden, weight, noise="token", **options)
        assert sample.found is not None
        assert torch.equal(sample.tokens, expected.tokens)
        assert torch.equal(sample.valid, expected.valid)
        offset += 1
    return sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1000, 1152, 4096])
@pytest.mark.parametrize("B", [1, 5, 16, 17, 33, 64, 77, 256])
def test_tokens_are_equal_to_the_last_one(B, D, dtype):
    # Without an allowance for ties: the logits of the candidates are the same bits.
    assert assert_same("plain", *matrices(B, D, 32_000, dtype=dtype), steps=20).valid.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1000, 1152, 4096, 8192])
@pytest.mark.parametrize("B", [1, 5, 8, 9, 16])
def test_filtered_tokens_are_equal_to_the_last_one(B, D, dtype):
    hidden, weight = matrices(B, D, 32_001, dtype=dtype)
    for top_k in (1, 20, 64):
        filters = {"top_k": top_k, "top_p": 0.95, "min_p": 0.01, "temperature": 1.5}
        sample = assert_same("filtered", hidden, weight, steps=5, **filters)
        assert sample.valid.all() and (sample.found >= top_k).all()


@pytest.mark.parametrize("V", [100, 5000, 40_001, 70_000, 70_007])
@pytest.mark.parametrize("B", [3, 24, 64])
def test_any_number_of_tokens(B, V):
    # Programs without a tile, and with one of the tail; 70,000: rounds of 256 tokens and a tail.
    assert_same("plain", *matrices(B, 1024, V), steps=5)


@pytest.mark.parametrize("V", [20, 100, 5000, 70_007, 151_936])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"top_p": 1.0, "min_p": 0.05}], ids=str)
def test_any_number_of_filtered_tokens(V, filters):
    for sigma in (0.1, 3.0, 16.0):
        options = {"top_k": 12, "temperature": 1.5, **filters}
        assert_same("filtered", *matrices(7, 2048, V, sigma), steps=5, **options)


@pytest.mark.parametrize("sigma", [0.1, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_any_spread(sigma, temperature):
    assert_same("plain", *matrices(16, 2048, 151_936, sigma), temperature=temperature)


@each_call
def test_options_together(call):
    B, V = (24, 40_000) if call == "plain" else (16, 40_000)
    row = torch.arange(B, device="cuda")
    filters = {
        "top_k": torch.tensor([0, 1, 20, 64, 65, -1, 50, 7] * 2, device="cuda"),
        "top_p": 0.5 + row / 20,
        "min_p": row / 200,
    }
    assert_same(
        call,
        *matrices(B, 1024, V),
        **(filters if call == "filtered" else {}),
        temperature=(row % 5) / 2.0,
        bias=torch.randn(B, V, device="cuda"),
        mask=torch.rand(B, V, device="cuda") < 0.3,
        soft_cap=20.0,
        seed=row,
        vocab_size=V,
    )


@each_call
def test_rows_that_must_be_computed_in_full_are_right_and_counted(call):
    B = 64 if call == "plain" else 16
    hidden, weight = matrices(B, 1024, 40_000)
    hidden[5, 0], hidden[11, 3] = torch.nan, torch.inf
    hidden[7] *= 1e-30  # too small to be rounded: at T = 0 all tokens are candidates
    T = torch.ones(B, device="cuda")
    T[7] = 0
    sample = assert_same(call, hidden, weight, temperature=T)
    assert (sample.found < 0).nonzero()[:, 0].tolist() == [5, 7, 11]
    assert (~sample.valid).nonzero()[:, 0].tolist() == [5, 11]


def test_few_are_computed_at_the_paper_s_sizes():
    for D, V in ((4096, 151_936), (8192, 128_256)):
        sample = assert_same("filtered", *matrices(16, D, V), temperature=1.5)
        assert (sample.found >= 20).all() and sample.found.float().mean() < 2000


@pytest.mark.parametrize("V, rows", [(100, 100), (1000, 1060), (2500, 2500), (3999, 4100)])
@pytest.mark.parametrize("B", [5, 24, 64])  # both screens
def test_rows_without_bounds_draw_no_padding(B, V, rows):
    # All tokens of such a row are on its list: the vocabulary is small.
    hidden, weight = matrices(B, 1024, rows)
    weight[V:] = 64 * hidden[2].sign()
    T = torch.ones(B, device="cuda")
    hidden[0, 3], hidden[1] = torch.nan, torch.inf
    hidden[2] *= 2.0**51
    T[3], T[4] = torch.nan, 2.0**110
    sample = assert_same("plain", hidden, weight, steps=5, temperature=T, vocab_size=V)
    assert sample.found.max() <= V


def test_launches_on_two_streams_do_not_disturb_each_other():
    hidden, weight = matrices(64, 1024, 40_000)
    head, streams = prepare_head(weight), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    drawn = [[], []]
    for step in range(30):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                seed = torch.tensor([100 * number + step], device="cuda")
                drawn[number].append(screened_sample(hidden, head, seed=seed).tokens)
    torch.cuda.synchronize()
    for number in range(2):
        for step, tokens in enumerate(drawn[number]):
            same = flash_sample(hidden, weight, seed=on_device(100 * number + step), noise="token")
            assert torch.equal(tokens, same.tokens)


@each_call
def test_a_captured_graph_draws_afresh_as_the_offset_advances(call):
    sampler, of_weight, filters = CALLS[call]
    hidden, weight = matrices(16 if call == "plain" else 4, 1024, 40_000)
    head, offset = prepare_head(weight), on_device(0)
    options = {"seed": on_device(2), "offset": offset, "temperature": 2.0, **filters}
    sampler(hidden, head, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler(hidden, head, **options)
    drawn = set()
    for step in range(50):
        offset.fill_(step)
        hidden.copy_(torch.randn_like(hidden) / 10)
        graph.replay()
        expected = of_weight(hidden, weight, noise="token", **options)
        assert torch.equal(captured.tokens, expected.tokens) and captured.found.min() > 0
        drawn.add(tuple(captured.tokens.tolist()))
    assert len(drawn) > 40


def test_the_copy_is_that_of_a_cpu():
    _, weight = matrices(1, 4096, 20_000)
    head, other = prepare_head(weight), prepare_head(weight.cpu())
    for name in ("codes", "scale"):
        assert torch.equal(getattr(head, name).cpu(), getattr(other, name))
    for name in ("residual", "norm"):
        assert torch.allclose(getattr(head, name).cpu(), getattr(other, name), rtol=1e-6)


def test_cublas_logits_are_within_the_bound():
    hidden, weight = matrices(16, 8192, 20_000)
    head = prepare_head(weight)
    z, bound = screen_logits(
        ScreenedHead(*(part.cpu() for part in (head.weight, *head.copy))),
        screen_hidden(hidden.cpu()),
    )
    logits = torch.mm(hidden, weight.T, out_dtype=torch.float32).cpu()
    share = (logits - z).abs() / bound
    assert share.max() < 0.5


@triton.jit
def _largest_error(worst_ptr, first, BLOCK: tl.constexpr):
    """Store the largest difference between the screen's noise and the samplers' of 2^28 codes."""
    code = (first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    error = tl.abs(rough_gumbel(code, True) - gumbel(code))
    tl.atomic_max(worst_ptr, tl.max(error, 0))


@pytest.mark.parametrize("chunk", range(16))
def test_the_rough_noise_of_the_screen_is_within_its_slack(chunk):
    """All 2^32 codes: the slack of scores is 2^-9 T, and their rounding takes little of it."""
    worst = torch.zeros(1, dtype=torch.float32, device="cuda")
    _largest_error[(2**28 // 4096,)](worst, chunk * 2**28, BLOCK=4096)
    assert 0 < worst.item() < 2.0**-10


@triton.jit
def _logits(hidden, weight, out, V, D, R: tl.constexpr, BLOCKS: tl.constexpr,
            BY_WARPS: tl.constexpr):  # fmt: skip
    b = tl.program_id(1)
    token = tl.program_id(0) * R + tl.arange(0, R)
    exists = token < V
    y = exact_logits(
        hidden, weight, None, None, None, b, tl.where(exists, token, 0), exists, V, D, BLOCKS, 128,
        True, BY_WARPS,
    )  # fmt: skip
    tl.store(out + b.to(tl.int64) * V + token, y, mask=exists)


def logits(hidden: Tensor, weight: Tensor, by_warps: bool, num_warps: int = 4) -> Tensor:
    (B, D), V = hidden.shape, len(weight)
    R = 8 * num_warps if by_warps else 64
    out = torch.empty(B, V, device="cuda")
    blocks = max(8, triton.next_power_of_2(D // 256))
    _logits[(triton.cdiv(V, R), B)](
        hidden=hidden, weight=weight, out=out, V=V, D=D, R=R, BLOCKS=blocks, BY_WARPS=by_warps,
        num_warps=num_warps, num_stages=4,
    )  # fmt: skip
    return out


def rows_of(n: int, D: int, spread: str) -> Tensor:
    """Return normal numbers, numbers of many magnitudes, or numbers that cancel."""
    x = torch.randn(n, D, device="cuda")
    if spread == "wide":
        return x * torch.exp2(torch.randint(-12, 12, (n, D), device="cuda").float())
    if spread == "signs":
        return x.sign() * (1 + torch.rand(n, D, device="cuda") / 64)
    return x


@pytest.mark.parametrize("D", [256, 768, 4096, 8192])  # an odd number of parts, and an even one
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", ["normal", "wide", "signs"])
def test_sums_by_warps_are_the_same_bits(D, dtype, spread):
    torch.manual_seed(D)
    weight, hidden = rows_of(8195, D, spread).to(dtype), rows_of(8, D, spread).to(dtype)
    hidden /= D**0.5
    expected = logits(hidden, weight, False)
    for num_warps in (4, 8):
        by_warps = logits(hidden, weight, True, num_warps)
        assert torch.equal(by_warps.view(torch.int32), expected.view(torch.int32))

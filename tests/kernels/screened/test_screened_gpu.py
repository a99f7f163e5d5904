"""The screened sampler on a GPU: token for token flash_sample with token noise."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from fsbench.kernels import ScreenedHead, flash_sample, prepare_head, screened_sample
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.noise.contract import gumbel
from fsbench.kernels.screened.bounds import screen_hidden, screen_logits
from fsbench.kernels.screened.score_bounds import rough_gumbel

pytestmark = pytest.mark.gpu


@triton.jit
def _largest_error(worst_ptr, first, BLOCK: tl.constexpr):
    """The largest difference of the screen's noise from that of the samplers, of 2^28 codes."""
    code = (first + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.uint32)
    error = tl.abs(rough_gumbel(code, True) - gumbel(code))
    tl.atomic_max(worst_ptr, tl.max(error, 0))


def matrices(
    B: int, D: int, V: int, sigma: float = 3.0, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(B + D + V)
    hidden = torch.randn(B, D, device="cuda") * sigma / D**0.5
    return hidden.to(dtype), torch.randn(V, D, device="cuda", dtype=dtype)


def on_device(seed: int) -> torch.Tensor:
    return torch.tensor([seed], device="cuda")


def assert_same(hidden: torch.Tensor, weight: torch.Tensor, **options) -> Screened:
    """What it draws: the tokens of flash_sample with token noise, bit for bit."""
    sample = screened_sample(hidden, prepare_head(weight), **options)
    same = flash_sample(hidden, weight, noise="token", **options)
    assert torch.equal(sample.tokens, same.tokens) and torch.equal(sample.valid, same.valid)
    return sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1000, 1152, 4096])
@pytest.mark.parametrize("B", [1, 5, 16, 17, 33, 64, 77, 256])
def test_tokens_are_equal_to_the_last_one(B, D, dtype):
    # Not "but for ties": the logits of the survivors are the same bits.
    hidden, weight = matrices(B, D, 32_000, dtype=dtype)
    head, offset = prepare_head(weight), on_device(0)
    for _ in range(20):
        sample = screened_sample(hidden, head, seed=on_device(7), offset=offset)
        same = flash_sample(hidden, weight, seed=on_device(7), offset=offset, noise="token")
        assert torch.equal(sample.tokens, same.tokens)
        assert sample.valid.all()
        offset += 1


@pytest.mark.parametrize("V", [100, 5000, 40_001, 70_000, 70_007])
@pytest.mark.parametrize("B", [3, 24, 64])
def test_any_number_of_tokens(B, V):
    # Programs without a tile, and with one of the tail; 70,000: rounds of 256 tokens and a tail.
    hidden, weight = matrices(B, 1024, V)
    for seed in range(5):
        assert_same(hidden, weight, seed=on_device(seed))


@pytest.mark.parametrize("sigma", [0.1, 1.0, 4.0, 16.0])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_any_spread(sigma, temperature):
    hidden, weight = matrices(16, 2048, 151_936, sigma)
    options = {"seed": on_device(3), "temperature": temperature}
    assert_same(hidden, weight, **options)


def test_options_together():
    B, D, V = 24, 1024, 40_000
    hidden, weight = matrices(B, D, V)
    options = {
        "temperature": torch.linspace(0, 2, B, device="cuda"),
        "bias": torch.randn(B, V, device="cuda"),
        "mask": torch.rand(B, V, device="cuda") < 0.3,
        "soft_cap": 20.0,
        "seed": torch.arange(B, device="cuda"),
        "offset": on_device(2**33 + 5),
        "vocab_size": V,
    }
    assert_same(hidden, weight, **options)


def test_rows_that_must_be_computed_in_full_are_right_and_counted():
    hidden, weight = matrices(64, 1024, 40_000)
    hidden[5, 0], hidden[40, 3] = torch.nan, torch.inf
    hidden[33] *= 1e-30  # too small to be rounded: at T = 0 nothing tells its logits apart
    T = torch.ones(64, device="cuda")
    T[33] = 0
    options = {"seed": on_device(1), "temperature": T}
    sample = assert_same(hidden, weight, **options)
    assert (sample.found < 0).nonzero()[:, 0].tolist() == [5, 33, 40]
    assert (~sample.valid).nonzero()[:, 0].tolist() == [5, 40]


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
    for seed in range(5):
        options = {"seed": on_device(seed), "temperature": T, "vocab_size": V}
        sample = assert_same(hidden, weight, **options)
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


@pytest.mark.parametrize("chunk", range(16))
def test_the_rough_noise_of_the_screen_is_within_its_slack(chunk):
    """Of all 2^32 codes: the slack of scores is 2^-9 T, and rounding them takes little of it."""
    worst = torch.zeros(1, dtype=torch.float32, device="cuda")
    _largest_error[(2**28 // 4096,)](worst, chunk * 2**28, BLOCK=4096)
    assert 0 < worst.item() < 2.0**-10


def test_a_captured_graph_draws_afresh_as_the_offset_advances():
    hidden, weight = matrices(16, 1024, 40_000)
    head, seed, offset = prepare_head(weight), on_device(2), on_device(0)
    screened_sample(hidden, head, seed=seed, offset=offset)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = screened_sample(hidden, head, seed=seed, offset=offset)
    drawn = set()
    for step in range(50):
        offset.fill_(step)
        graph.replay()
        same = flash_sample(hidden, weight, seed=seed, offset=offset, noise="token")
        assert torch.equal(captured.tokens, same.tokens)
        drawn.add(tuple(captured.tokens.tolist()))
    assert len(drawn) > 40


def test_the_copy_is_that_of_a_cpu_and_made_in_seconds():
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

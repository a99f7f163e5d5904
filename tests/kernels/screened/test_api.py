"""The screened sampler returns the tokens of flash_sample with token noise, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from tiers import full
from torch import Tensor

from fsbench import reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import flash_sample
from fsbench.kernels.configs.screen_choice import default_configs
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.noise.contract import gumbel
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.bounds import accumulation_error, screen_hidden
from fsbench.kernels.screened.head import prepare_head
from fsbench.kernels.screened.rounding import round_claimed_rows
from fsbench.kernels.screened.score_bounds import rough_gumbel

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
DTYPES = [
    pytest.param(torch.bfloat16, id="torch"),
    pytest.param(torch.float16, id="kernels", marks=pytest.mark.interpreter),
]
"""On CPU tensors bf16 runs in torch, and fp16 in the kernels by Triton's interpreter."""


def matrices(
    B: int, D: int, V: int, dtype: torch.dtype, sigma: float = 3.0
) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(B + D + V)
    hidden = torch.randn(B, D, generator=draw) * sigma / D**0.5
    return hidden.to(dtype), torch.randn(V, D, generator=draw).to(dtype)


def assert_expected(sample: Screened, hidden: Tensor, weight: Tensor, **options) -> None:
    """Assert the tokens of the reference on fp32 logits, except where rounding may decide."""
    named = {name: options[name] for name in ("soft_cap", "bias", "mask") if name in options}
    logits = reference.processed_logits(hidden.float() @ weight.float().T, **named)
    seed, offset = options["seed"], options.get("offset", torch.tensor([0]))
    error = reference.matmul_error(hidden, weight)
    if "soft_cap" in options:
        error += options["soft_cap"] * 2.0**-22
    expected = reference.expect(
        logits, seed, offset, options.get("temperature", 1.0), "token", logits_error=error
    )
    assert expected.accepts(sample.tokens).all()
    # Ties are rare: nearly all tokens must be equal.
    assert (sample.tokens == expected.tokens).float().mean() >= 0.95
    assert torch.equal(sample.valid, sample.tokens >= 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "D", "V", "sigma"),
    [(1, 64, 128, 3.0), (3, 40, 600, 0.1), (17, 300, 517, 1.0), (40, 96, 130, 16.0)],
)
def test_tokens_are_those_of_flash_sample(B, D, V, sigma, dtype):
    hidden, weight = matrices(B, D, V, dtype, sigma)
    seed, offset = torch.tensor([11]), torch.tensor([5])
    sample = screened_sample(hidden, prepare_head(weight), seed=seed, offset=offset)
    assert_expected(sample, hidden, weight, seed=seed, offset=offset)
    same = flash_sample(hidden, weight, seed=seed, offset=offset, noise="token")
    assert torch.equal(sample.tokens, same.tokens)
    assert torch.equal(sample.valid, same.valid)
    assert (sample.found >= 1).all()
    if sigma >= 1.0:
        assert sample.found.float().mean() < 6  # few logits are computed


V = 300
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "rows of temperatures": {"temperature": torch.tensor([0.0, 0.5, 1.0, 2.0**-121, 7.0])},
    "bad temperatures": {"temperature": torch.tensor([1.0, -1.0, torch.nan, torch.inf, 2.0**110])},
    "bias per row": {"bias": torch.linspace(-4, 4, 5 * V).view(5, V).bfloat16()},
    "shared bias": {
        "bias": torch.linspace(-4, 4, V).masked_fill(torch.arange(V) % 3 == 0, -torch.inf),
        "temperature": 0.3,
    },
    "lowest biases": {"bias": torch.full((V,), torch.finfo(torch.float32).min)},
    "words of a mask": {"mask": torch.full((5, 10), 0x01010101, dtype=torch.int32)},
    "nothing allowed": {"mask": torch.arange(5)[:, None].expand(5, V).contiguous() != 2},
    "soft cap": {"soft_cap": 2.0},
    "everything": {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 7.0]),
        "bias": torch.linspace(-2, 2, 5 * V).view(5, V),
        "mask": torch.arange(5 * V).view(5, V) % 5 < 3,
        "soft_cap": 5.0,
        "seed": torch.tensor([5, 5, -7, 2**40, 0]),
        "offset": torch.tensor([0, 1, 2, 2**33, 4]),
    },
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, dtype):
    hidden, weight = matrices(5, 64, V, dtype)
    options = {"seed": torch.tensor([3]), **OPTIONS[name]}
    sample = screened_sample(hidden, prepare_head(weight), **options)
    assert_expected(sample, hidden, weight, **options)
    same = flash_sample(hidden, weight, noise="token", **options)
    assert (sample.tokens == same.tokens).float().mean() >= 0.8  # except ties of rounding
    assert torch.equal(sample.valid, same.valid)


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_probabilities_are_exact_and_change_no_token(dtype):
    hidden, weight = matrices(4, 64, 300, dtype)
    options = {"seed": torch.tensor([3]), "temperature": 0.7, "num_samples": 2}
    sample = screened_sample(
        hidden, prepare_head(weight), return_logprob=True, return_logz=True, **options
    )
    same = flash_sample(hidden, weight, noise="token", **options)
    assert torch.equal(sample.tokens, same.tokens) and torch.equal(sample.valid, same.valid)
    plain = screened_sample(hidden, prepare_head(weight), **{**options, "num_samples": 1})
    assert (sample.tokens[:, 0] == plain.tokens).float().mean() >= 0.75
    assert plain.logprob is None and plain.logz is None
    logits = hidden.double() @ weight.double().T / 0.7
    expected = logits.log_softmax(1).gather(1, sample.tokens)
    assert torch.allclose(sample.logprob.double(), expected, atol=1e-3)
    assert torch.allclose(sample.logz.double(), logits.logsumexp(1), atol=1e-3)
    assert sample.found is None  # the full kernel ran


@pytest.mark.parametrize("dtype", DTYPES)
def test_undefined_rows_disturb_no_neighbor(dtype):
    hidden, weight = matrices(5, 64, 300, dtype)
    hidden[1, 3], hidden[3, 0] = torch.nan, torch.inf
    seed = torch.tensor([3])
    sample = screened_sample(hidden, prepare_head(weight), seed=seed)
    assert sample.tokens[1] == sample.tokens[3] == -1
    assert sample.valid.tolist() == [True, False, True, False, True]
    same = flash_sample(hidden, weight, seed=seed, noise="token")
    assert torch.equal(sample.tokens, same.tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_undefined_rows_of_the_weight(dtype):
    hidden, weight = matrices(4, 64, 300, dtype)
    head = weight.clone()
    head[7, 0] = torch.nan
    seed = torch.tensor([3])
    assert (screened_sample(hidden, prepare_head(head), seed=seed).tokens == -1).all()
    # A mask forbids it before it is looked at; a bias of -inf leaves a NaN.
    mask = torch.ones(4, 300, dtype=torch.bool)
    mask[:, 7] = False
    bias = torch.where(torch.arange(300) == 7, -torch.inf, 0.0)
    for options in ({"mask": mask}, {"bias": bias}, {"bias": bias.expand(4, 300).contiguous()}):
        sample = screened_sample(hidden, prepare_head(head), seed=seed, **options)
        same = flash_sample(hidden, head, seed=seed, noise="token", **options)
        assert torch.equal(sample.tokens, same.tokens)
        assert bool(sample.valid.all()) == ("mask" in options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_scores_go_to_the_lowest_id_below_vocab_size(dtype):
    hidden, weight = matrices(2, 64, 300, dtype)
    weight[250] = weight[37] = weight[36] = 4 * hidden[1].sign() * weight.abs().amax()
    weight[260:] = 100 * hidden[1]
    options = {"seed": torch.tensor([3]), "temperature": 0.0, "vocab_size": 260}
    assert screened_sample(hidden, prepare_head(weight), **options).tokens[1] == 36


@pytest.mark.interpreter
def test_rows_with_too_many_candidates_are_computed_in_full_and_counted():
    # Flat logits of a hidden state with large bounds: every token is a candidate at T = 0. Sums are
    # exact: how a CPU's matmul rounds equal rows depends on its shape.
    hidden, weight = matrices(20, 64, 700, torch.float16)
    hidden, weight[:] = (8 * hidden).round() / 8, (2048 * weight[0]).round() / 2048
    weight[:, 0] = torch.linspace(0.9, 0.901, 700).half()
    hidden[3], hidden[18] = hidden[3] / 1024, hidden[18] * 64
    seed = torch.tensor([3])
    T = torch.ones(20)
    T[3] = T[18] = 0.0
    options = {"seed": seed, "temperature": T}
    sample = screened_sample(hidden, prepare_head(weight), **options)
    assert (sample.found[[3, 18]] == -1).all()
    others = [b for b in range(20) if b not in (3, 18)]
    assert (sample.found[others] > 0).all()
    same = flash_sample(hidden, weight, noise="token", **options)
    assert torch.equal(sample.tokens, same.tokens)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("screen", "resolve"),
    [
        ({"block_v": 256, "v_on_m": True, "ctas_per_sm": 2}, {"at_once": 64, "ctas_per_sm": 3}),
        full({"block_b": 8, "slice": 32}, {"step": 16}),
        full({"block_b": 32, "block_d": 32, "room": 64}, {}),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_configs(screen, resolve):
    hidden, weight = matrices(18, 104, 400, torch.float16)
    head, seed = prepare_head(weight), torch.tensor([8])
    configs = default_configs(18, 104, CPU)
    plain = screened_sample(hidden, head, seed=seed)
    configs = (replace(configs[0], **screen), replace(configs[1], **resolve))
    other = screened_sample(hidden, head, seed=seed, configs=configs)
    assert torch.equal(plain.tokens, other.tokens)


@pytest.mark.interpreter
def test_a_call_leaves_nothing_behind_for_the_next():
    hidden, weight = matrices(3, 64, 300, torch.float16)
    head = prepare_head(weight)
    first, second, repeated = (
        screened_sample(hidden, head, seed=torch.tensor([seed])).tokens for seed in (0, 1, 0)
    )
    assert torch.equal(first, repeated) and not torch.equal(first, second)


@triton.jit
def _both_noises(codes_ptr, rough_ptr, exact_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    code = tl.load(codes_ptr + i).to(tl.uint32)
    tl.store(rough_ptr + i, rough_gumbel(code, False))
    tl.store(exact_ptr + i, gumbel(code))


@pytest.mark.interpreter
def test_rough_noise_is_within_its_slack():
    """test_screened_gpu.py has all 2^32 codes, and the GPU's logarithm."""
    ends = torch.tensor([0, 1, 2, 2**22 - 1, 2**22, 2**22 + 1, 2**31 - 1, 2**31, 2**32 - 1])
    draw = torch.Generator().manual_seed(1)
    spread = (2.0 ** (32 * torch.rand(4087, generator=draw))).long()
    codes = torch.cat([ends, 2**32 - 1 - spread[:2000], spread[2000:]]).clamp(0, 2**32 - 1)
    rough, exact = torch.empty(2, 4096).unbind()
    _both_noises[(1,)](codes, rough, exact, BLOCK=4096)
    assert 2.0**-13 < (rough - exact).abs().max() < 2.0**-10


@triton.jit
def _rounded(hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, B, D, gamma, inflation,
             root):  # fmt: skip
    cols = tl.arange(0, 128)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D, gamma, inflation,
        root, False,
    )  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize("exponent", [-100, -40, 0, 40])
def test_the_numbers_of_the_kernel_bound_the_error_of_its_codes(exponent):
    """The numbers may differ from those in torch in the last bits."""
    B, D = 5, 300
    hidden = torch.randn(B, D, generator=torch.Generator().manual_seed(1)) * 2.0**exponent
    hidden[2] = 0
    hidden[4, 7] = torch.nan
    codes = torch.zeros(16, D, dtype=torch.int8)
    numbers = torch.full((3, B), -1.0)
    num_exact = torch.full((B,), 77, dtype=torch.int32)
    counters = torch.zeros(2, dtype=torch.int32)
    _rounded[(2,)](
        hidden, codes, numbers, num_exact, counters, B, D, accumulation_error(D),
        1 + (D + 4) * 2.0**-24, D**0.5,
    )  # fmt: skip
    assert num_exact.tolist() == [0] * B
    assert counters.tolist() == [B + 2, B]
    high, low = codes.double().view(2, 8, D)[:, :B]
    whole = 256 * high + low
    step, reach, spread = numbers.double()
    good = torch.tensor([0, 1, 2, 3])
    error = (hidden.double() - step[:, None] * whole)[good].norm(dim=1)
    assert (error <= spread[good]).all()
    assert (hidden.double()[good].norm(dim=1) <= reach[good]).all()
    assert reach[4] == torch.inf
    assert step[4] == 0 and not whole[4].any()
    assert torch.allclose(spread[good], screen_hidden(hidden).spread.double()[good], rtol=1e-2)


def test_bad_arguments():
    hidden, weight = matrices(2, 16, 64, torch.bfloat16)
    head, seed = prepare_head(weight), torch.tensor([0])
    for wrong, more, error, message in [
        (replace(head, codes=head.codes[:32]), {}, InvalidArgument, "head.codes: expected shape"),
        (weight, {}, InvalidType, "head: expected a ScreenedHead; got Tensor"),
        (replace(head, scale=head.scale.double()), {}, InvalidType, "head.scale: expected dtype"),
        (prepare_head(weight.half()), {}, InvalidType, r"weight: expected dtype torch\.bfloat16"),
        (head, {"vocab_size": 65}, InvalidArgument, "vocab_size: expected 1 to 64"),
    ]:
        with pytest.raises(error, match=message):
            screened_sample(hidden, wrong, seed=seed, **more)


@pytest.mark.parametrize("samples", [1, 2])
def test_bad_configs(samples):
    """Configs are checked also where they are not used: in torch, and with several samples."""
    hidden, weight = matrices(2, 16, 64, torch.bfloat16)
    head, seed = prepare_head(weight), torch.tensor([0])
    screen, resolve = default_configs(2, 16, hidden.device)
    for configs, error, message in (
        ((1, 2), InvalidType, "expected a ScreenConfig or HopperScreenConfig first; got int"),
        ((screen, screen), InvalidType, "expected a ResolveConfig second; got ScreenConfig"),
        ((screen,), InvalidArgument, "expected two, one for each launch; got 1"),
        ((), InvalidArgument, "expected two, one for each launch; got 0"),
        (screen, InvalidType, "expected a tuple; got ScreenConfig"),
    ):
        with pytest.raises(error, match=f"configs: {message}"):
            screened_sample(hidden, head, seed=seed, configs=configs, num_samples=samples)
    screened_sample(hidden, head, seed=seed, configs=(screen, resolve), num_samples=samples)

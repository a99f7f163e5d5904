"""What every capability promises, as a check: check_<capability>(provider, device, dtype).

Each raises AssertionError if the promise is not kept. Logits are exact (every one is a stored
number) and counters and torch's generators are set before each call, so two calls that must agree
agree to the bit, also where the sampler's noise is its own, and a verdict never flickers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from flash_sample_cases import packed
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsbench import reference
from fsbench.graphs import capture
from fsbench.inputs import TORCH_DTYPES, head_with_logits, make_hidden, make_weight
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Drawn, Kind, Launch, Provider
from fsbench.verify.pathwise import check_on_problem
from fsbench.verify.statistics import goodness_of_fit

SIZES = {"cpu": (6, 16, 200), "cuda": (48, 64, 5003)}
"""(B, D, V) by device: in the interpreter, one tile of a kernel that takes 0.1 s for it."""


def logits_of(
    device: str, number: int = 0, rows: int | None = None, vocabulary: int | None = None
) -> Tensor:
    """[B, V] fp32: random multiples of 1/4, exact in any dtype, and so is a sum of two.

    The number tells one draw of them from another.
    """
    B, _, V = SIZES[device]
    shape = (rows or B, vocabulary or V)
    quarters = 8 * torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (quarters.round().clamp(-32, 32) / 4).to(device)


def counter(values: int | list[int], device: str) -> Tensor:
    """A seed or an offset."""
    return torch.tensor(values, dtype=torch.int64, device=device).reshape(-1)


def head(logits: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """hidden [B, D] and weight [V, D] with exactly these logits [<= D, V]."""
    return head_with_logits(logits, TORCH_DTYPES[dtype], SIZES[logits.device.type][1])


def launched(
    provider: Provider, logits: Tensor, dtype: str, T: float = 1.0, rows: int | None = None
) -> tuple[Launch, Tensor]:
    """The launch of a problem with these logits, repeated up to `rows`, and its hidden states."""
    hidden, weight = head(logits, dtype)
    if rows is not None:
        hidden = hidden[torch.arange(rows, device=hidden.device) % len(hidden)].contiguous()
    problem = Problem(*hidden.shape, len(weight), dtype, T, logits.device.type)
    return provider.build(problem, weight), hidden


def step(launch: Launch, hidden: Tensor, seed: int = 5, offset: int = 9) -> Tensor:
    """What one launch returns."""
    torch.manual_seed(0)
    device = hidden.device.type
    return launch(hidden, counter(seed, device), counter(offset, device)).clone()


def drawn(
    provider: Provider, logits: Tensor, dtype: str, *, offset: int = 9, **options: object
) -> Drawn:
    """What the full call returns for these logits [B, V], at T = 1 unless the options say more."""
    assert provider.sample is not None
    device = logits.device.type
    options = {"seed": counter(5, device), **options}
    hidden, weight = head(logits, dtype)
    torch.manual_seed(0)
    result = provider.sample(hidden, weight, offset=counter(offset, device), **options)
    n = options.get("num_samples", 1)
    assert_tokens(result.tokens, (len(logits),) if n == 1 else (len(logits), n), logits.shape[1])
    return result


def assert_tokens(tokens: Tensor, shape: tuple[int, ...], vocabulary: int) -> None:
    """Integers of this shape in [0, vocabulary)."""
    assert tuple(tokens.shape) == shape, f"tokens of shape {tuple(tokens.shape)}, not {shape}"
    assert tokens.dtype in (torch.int32, torch.int64), f"tokens of {tokens.dtype}"
    assert ((tokens >= 0) & (tokens < vocabulary)).all(), tokens.tolist()


def assert_same(what: str, tokens: Tensor, wanted: Tensor) -> None:
    assert torch.equal(tokens, wanted), f"{what}: {tokens.tolist()} instead of {wanted.tolist()}"


def assert_greedy(tokens: Tensor, logits: Tensor) -> None:
    """The tokens' logits are their rows' largest: of equal ones any will do."""
    assert_tokens(tokens, (len(logits),), logits.shape[1])
    picked = logits.gather(1, tokens.long()[:, None])[:, 0]
    assert_same("logits of greedy tokens", picked, logits.max(1).values)


# What a Launch shows


def check_dtypes(provider: Provider, device: str, dtype: str) -> None:
    """It runs in this dtype, and a sampler's tokens are such as it should draw."""
    problem = Problem(*SIZES[device], dtype, 0.8, device)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = provider.build(problem, weight)
    out = step(launch, hidden)
    if provider.kind is Kind.LOWER_BOUND:
        return
    assert_tokens(out, (problem.B,), problem.V)
    verdict = check_on_problem(provider, problem, launch, hidden, weight)
    assert verdict.passed, verdict.detail


def check_noise(provider: Provider, device: str, dtype: str) -> None:
    """Tokens are the oracle's, also for counters of many bits."""
    logits = logits_of(device)
    launch, hidden = launched(provider, logits, dtype, T=0.7)
    for seed, offset in ((-(2**63) + 1, 7), (0x0123456789ABCDEF, 2**32 - 1)):
        expected = reference.expect(
            logits, torch.tensor([seed]), torch.tensor([offset]), 0.7, provider.capabilities.noise
        )
        tokens = step(launch, hidden, seed, offset)
        assert expected.accepts(tokens).all(), f"{tokens.tolist()}, {expected.tokens.tolist()}"


def check_zero_temperature(provider: Provider, device: str, dtype: str) -> None:
    """At T = 0 a sampler takes the largest logit; a lower bound does what it does at T = 1."""
    logits = logits_of(device)
    out = step(*launched(provider, logits, dtype, T=0.0))
    if provider.kind is Kind.LOWER_BOUND:
        assert_same("at T = 0", out, step(*launched(provider, logits, dtype)))
    else:
        assert_greedy(out, logits)


def check_fused(provider: Provider, device: str, dtype: str) -> None:
    """A launch allocates nothing as large as the logits.

    Their vocabulary is large: scratch memory for every program does not grow with it.
    """
    logits = logits_of(device, rows=16, vocabulary=2**16 if device == "cpu" else 2**19)
    launch, hidden = launched(provider, logits, dtype)
    step(launch, hidden)  # what is allocated once and kept is no part of a step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        step(launch, hidden)
    # Of an operator the profiler gives what it allocated less what it freed: all that it leaves.
    field = "self_cpu_memory_usage" if device == "cpu" else "self_device_memory_usage"
    largest = max(getattr(event, field) for event in memory.events())
    stored = logits.numel() * hidden.element_size()
    assert 0 < largest < stored, f"{largest} bytes at once; the logits are {stored}"


def check_graph_safe(provider: Provider, device: str, dtype: str) -> None:
    """Two replays, the offset advanced in place, are two steps, and those of eager launches."""
    launch, hidden = launched(provider, logits_of(device), dtype)
    seed, offset = counter(5, device), counter(0, device)
    replay = capture(launch, hidden, seed, offset)
    replayed = []
    for number in (1, 2):
        offset.fill_(number)
        replayed.append(replay().clone())
    draws = provider.kind in (Kind.EXACT, Kind.TRUNCATED)
    if provider.capabilities.noise is not None or not draws:
        for number, out in enumerate(replayed, start=1):
            assert_same(f"replay {number}", out, step(launch, hidden, offset=number))
    if draws:
        assert not torch.equal(*replayed), f"both replays gave {replayed[0].tolist()}"


def check_host_sync_free(provider: Provider, device: str, dtype: str) -> None:
    """torch sees no synchronisation in a launch, nor in a full call with all that is claimed."""
    logits = logits_of(device)
    launch, hidden = launched(provider, logits, dtype)
    seed, offset = counter(5, device), counter(9, device)
    calls: list[Callable[[], object]] = [lambda: launch(hidden, seed, offset)]
    if provider.sample is not None:
        _, weight = head(logits, dtype)
        options = {"seed": seed, "offset": offset, **all_options(provider.capabilities, device)}
        calls.append(lambda: provider.sample(hidden, weight, **options))
    for call in calls:
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError as error:
            raise AssertionError("it synchronises") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")


def all_options(able: Capabilities, device: str) -> dict[str, object]:
    """Arguments of one full call that uses every option that is claimed."""
    bias = logits_of(device, 1)
    B = len(bias)
    T = torch.tensor([0.0 if able.greedy_rows else 0.5, 1.0] * (B // 2))
    arguments = {
        "per_row_temperature": ("temperature", T),
        "bias": ("bias", bias),
        "mask": ("mask", torch.ones_like(bias, dtype=torch.bool)),
        "per_request_seed": ("seed", torch.arange(B)),
        "logprob": ("return_logprob", True),
        "num_samples": ("num_samples", 3),
    }
    claimed = [arguments[option] for option in arguments if getattr(able, option)]
    return {
        name: value.to(device) if isinstance(value, Tensor) else value for name, value in claimed
    }


def check_batch_invariant(provider: Provider, device: str, dtype: str) -> None:
    """A row keeps its token in batches of other sizes and among other rows.

    On a GPU the batches reach past every size at which a sampler here changes its launch.
    """
    sizes = [1, 16] if device == "cpu" else [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256]
    largest = sizes[-1] + 1
    logits = logits_of(device, rows=16, vocabulary=None if device == "cpu" else 30_011)
    launch, hidden = launched(provider, logits, dtype, rows=largest)
    whole = step(launch, hidden)
    for size in sizes:
        part = step(*launched(provider, logits, dtype, rows=size))
        assert_same(f"of {largest} rows the first {size}", part, whole[:size])
    kept = [0, largest // 2, largest - 1]
    changed = hidden.roll(1, 0)
    changed[kept] = hidden[kept]
    assert_same(f"rows {kept} among others", step(launch, changed)[kept], whole[kept])


# What only the full call shows


def check_per_row_temperature(provider: Provider, device: str, dtype: str) -> None:
    """A row's token is that of a call in which every row has its temperature."""
    logits, each = logits_of(device), [0.25, 1.0, 4.0]
    T = torch.tensor(each * (len(logits) // 3), device=device)
    tokens = drawn(provider, logits, dtype, temperature=T).tokens
    for value in each:
        alone = drawn(provider, logits, dtype, temperature=value).tokens
        rows = T.eq(value)
        assert_same(f"rows of T = {value}", tokens[rows], alone[rows])


def check_greedy_rows(provider: Provider, device: str, dtype: str) -> None:
    """Rows of T = 0 are greedy; those beside them are drawn as if there were none."""
    logits = logits_of(device)
    T = torch.tensor([1.0, 0.0] * (len(logits) // 2), device=device)
    tokens = drawn(provider, logits, dtype, temperature=T).tokens
    assert_greedy(tokens[T == 0], logits[T == 0])
    alone = drawn(provider, logits, dtype).tokens
    assert_same("rows of T = 1", tokens[T == 1], alone[T == 1])


def check_bias(provider: Provider, device: str, dtype: str) -> None:
    """Tokens with a bias are those of the sum of logits and bias."""
    logits = logits_of(device)
    for bias in (logits_of(device, 1)[0], logits_of(device, 2)):
        tokens = drawn(provider, logits, dtype, bias=bias).tokens
        wanted = drawn(provider, logits + bias, dtype).tokens
        assert_same(f"with a bias of shape {tuple(bias.shape)}", tokens, wanted)


def check_mask(provider: Provider, device: str, dtype: str) -> None:
    """Tokens with a mask, in either form, are those of logits so low that they are never drawn."""
    logits = logits_of(device)
    mask = logits_of(device, 1) > 0
    mask[0] = True
    mask[1] = False
    mask[1, -1] = True
    wanted = drawn(provider, logits.masked_fill(~mask, -1e4), dtype).tokens
    for form in (mask, packed(mask)):
        tokens = drawn(provider, logits, dtype, mask=form).tokens
        assert_same(f"with a mask of {form.dtype}", tokens, wanted)


def check_per_request_seed(provider: Provider, device: str, dtype: str) -> None:
    """A request keeps its token when it moves with its seed; other seeds give other tokens."""
    logits = logits_of(device)
    B = len(logits)
    seeds = counter([0x0123456789ABCDEF * (row + 1) % 2**63 for row in range(B)], device)
    tokens = drawn(provider, logits, dtype, seed=seeds).tokens
    for order in ([*range(B - 1, -1, -1)], [4, 0, 3, 5]):
        moved = drawn(provider, logits[order], dtype, seed=seeds[order]).tokens
        assert_same(f"requests {order}", moved, tokens[order])
    same = logits[:1].repeat(B, 1)
    tokens = drawn(provider, same, dtype, seed=seeds).tokens
    assert len(set(tokens.tolist())) > 1, f"seeds that differ gave {tokens.tolist()}"
    tokens = drawn(provider, same, dtype, seed=seeds[:1].repeat(B)).tokens
    assert len(set(tokens.tolist())) == 1, f"one seed gave {tokens.tolist()}"


def check_logprob(provider: Provider, device: str, dtype: str) -> None:
    """Log-probabilities are those of the tokens under softmax(logits / T); tokens are the same."""
    logits = logits_of(device)
    for T in (0.5, 2.0):
        result = drawn(provider, logits, dtype, temperature=T, return_logprob=True)
        assert result.logprob is not None, "no logprob"
        wanted = reference.log_probability(logits, result.tokens.long(), T)
        assert result.logprob.shape == wanted.shape, tuple(result.logprob.shape)
        error = float((result.logprob - wanted).abs().max())
        assert error < 1e-3, f"T = {T}: off by {error}"
        without = drawn(provider, logits, dtype, temperature=T).tokens
        assert_same("tokens with logprob", result.tokens, without)


def check_num_samples(provider: Provider, device: str, dtype: str) -> None:
    """The samples of a row follow its softmax, one by one and as pairs: they are independent.

    One token is as likely as all others together, so that a few draws tell: repeated samples make
    too many pairs of it or without it, samples without replacement no pair of it.
    """
    logits = logits_of(device)[:1].repeat(16, 1)
    logits[:, 7] = round(4 * float(logits[0].logsumexp(0))) / 4
    p = torch.softmax(logits[0].double(), 0).cpu()
    tokens = torch.cat(
        [drawn(provider, logits, dtype, offset=i, num_samples=4).tokens.cpu() for i in range(4)]
    )
    assert_law("samples", tokens, p)
    likely = (tokens == 7).long()
    of_pairs = torch.stack([1 - p[7], p[7]]).outer(torch.stack([1 - p[7], p[7]])).flatten()
    for left, right in (([0, 2], [1, 3]), ([0, 1], [2, 3]), ([0, 1], [3, 2])):
        pairs = 2 * likely[:, left] + likely[:, right]
        assert_law(f"samples {left} with {right}", pairs, of_pairs)


def assert_law(what: str, outcomes: Tensor, p: Tensor) -> None:
    """The outcomes, integers, are independent draws from the probabilities p."""
    counts = torch.bincount(outcomes.flatten(), minlength=len(p))
    verdict = goodness_of_fit(counts.numpy(), p.double().numpy())
    assert verdict.passed, f"{what}: {verdict.detail}"


Check = Callable[[Provider, str, str], None]

CHECKS: dict[str, Check] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_dtypes,
        check_noise,
        check_zero_temperature,
        check_fused,
        check_graph_safe,
        check_host_sync_free,
        check_batch_invariant,
        check_per_row_temperature,
        check_greedy_rows,
        check_bias,
        check_mask,
        check_per_request_seed,
        check_logprob,
        check_num_samples,
    )
}
"""By the name of the field of Capabilities."""

NEED_CUDA = {"graph_safe", "host_sync_free"}
"""What these promise has no meaning on a CPU."""

NEED_COMPILER = {*NEED_CUDA, "fused"}
"""Of a Triton kernel: the interpreter keeps tiles in numpy's memory, which no profiler sees."""


def claims(provider: Provider) -> list[tuple[str, str]]:
    """(capability, dtype) of every claim: dtypes in each of them, the others in the first."""
    able = provider.capabilities
    return [
        (capability, dtype)
        for capability in CHECKS
        if getattr(able, capability)
        for dtype in (able.dtypes if capability == "dtypes" else able.dtypes[:1])
    ]

"""One check for each capability of a sampler.

On CPU tensors the battery of `fsbench verify` runs on small problems; on a GPU tests/fsbench/verify
runs it whole. Other capabilities have a check here. Verdicts repeat: logits are exact, and seeds,
steps and torch's generators are set before each call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fsbench import reference
from fsbench.graphs import capture
from fsbench.inputs import (
    TORCH_DTYPES,
    head_with_logits,
    make_hidden,
    make_weight,
    quantized,
    serving,
)
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

SIZES = {"cpu": (6, 16, 200), "cuda": (48, 64, 5003)}
"""(B, D, V) by device: in the interpreter, one tile of a kernel that takes 0.1 s for it."""

BATTERY = {
    "noise": "oracle",
    "zero_temperature": "greedy",
    "batch_invariant": "invariance",
    "per_row_temperature": "call",
    "per_request_seed": "call",
    "logprob": "call",
    "entropy": "score",
    "rank": "score",
    "top": "score",
    "greedy_rows": "masks",
    "mask": "masks",
}
"""Capability -> the check of the battery that judges it."""


def logits_of(
    device: str, number: int = 0, rows: int | None = None, V: int | None = None
) -> Tensor:
    """[B, V] fp32: random multiples of 1/4, exact in any dtype, and so is a sum of two."""
    shape = (rows or SIZES[device][0], V or SIZES[device][2])
    quarters = 8 * torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (quarters.round().clamp(-32, 32) / 4).to(device)


def counter(value: int, device: str) -> Tensor:
    """A seed or an offset."""
    return torch.tensor([value], dtype=torch.int64, device=device)


def head(logits: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """hidden [B, D] and weight [V, D] with exactly these logits [<= D, V]."""
    return head_with_logits(logits, TORCH_DTYPES[dtype], SIZES[logits.device.type][1])


def form_of(provider: Provider) -> str:
    """A form of heads that are quantized, of a sampler that takes nothing else; or ""."""
    refused = provider.supports(Problem(1, 16, 64, provider.capabilities.dtypes[0]))
    return provider.capabilities.quantized[0] if refused else ""


def launched(provider: Provider, logits: Tensor, dtype: str) -> tuple[Launch, Tensor]:
    """The launch of a problem with these logits, and its hidden states."""
    hidden, weight = head(logits, dtype)
    form = form_of(provider)
    problem = Problem(*hidden.shape, len(weight), dtype, 1.0, logits.device.type, weights=form)
    return serving(provider, form).build(problem, weight), hidden


def step(launch: Launch, hidden: Tensor, offset: int = 9) -> Tensor:
    """Output of one launch."""
    torch.manual_seed(0)
    device = hidden.device.type
    return launch(hidden, counter(5, device), counter(offset, device)).clone()


def drawn(provider: Provider, logits: Tensor, dtype: str, **options: object) -> Tensor:
    """Tokens of the full call for these logits [B, V], at T = 1."""
    assert provider.sample is not None
    device = logits.device.type
    counters = {"seed": counter(5, device), "offset": counter(9, device)}
    return provider.sample(*head(logits, dtype), **counters, **options).tokens


def check_dtypes(provider: Provider, device: str, dtype: str) -> None:
    """It runs in this dtype, and a sampler's tokens are such as it should draw."""
    problem = Problem(*SIZES[device], dtype, 0.8, device, weights=form_of(provider))
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = serving(provider, problem.weights).build(problem, weight)
    out = step(launch, hidden)
    if provider.kind is not Kind.LOWER_BOUND:
        numbers = (torch.float32,) if provider.kind is Kind.SCORE else (torch.int32, torch.int64)
        assert out.shape == (problem.B,) and out.dtype in numbers
        verdict = check_on_problem(provider, problem, launch, hidden, weight)
        assert verdict.passed, verdict.detail


def check_fused(provider: Provider, device: str, dtype: str) -> None:
    """A launch allocates nothing as large as the logits.

    Their vocabulary is large: scratch memory for every program does not grow with it.
    """
    sizes = {"rows": 4, "V": 2**16} if device == "cpu" else {"rows": 16, "V": 2**19}
    logits = logits_of(device, **sizes)
    launch, hidden = launched(provider, logits, dtype)
    step(launch, hidden)  # allocations that are kept are no part of a step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        step(launch, hidden)
    # For an operator the profiler reports allocated less freed bytes.
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
    for _ in range(2):
        offset.add_(1)
        replayed.append(replay().clone())
    draws = provider.kind in (Kind.EXACT, Kind.TRUNCATED)
    if provider.capabilities.noise is not None or not draws:
        for number, out in enumerate(replayed, start=1):
            assert torch.equal(out, step(launch, hidden, number)), f"replay {number}"
    if draws:
        assert not torch.equal(*replayed), f"both replays gave {replayed[0].tolist()}"


def check_host_sync_free(provider: Provider, device: str, dtype: str) -> None:
    """torch sees no synchronization in a launch, nor in a full call with all claimed options."""
    logits = logits_of(device)
    launch, hidden = launched(provider, logits, dtype)
    seed, offset = counter(5, device), counter(9, device)
    _, weight = head(logits, dtype)
    options = {"seed": seed, "offset": offset, **all_options(provider.capabilities, device)}
    calls = [lambda: launch(hidden, seed, offset)]
    calls += [lambda: provider.sample(hidden, weight, **options)] if provider.sample else []
    for make in calls:
        make()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            make()
        except RuntimeError as error:
            raise AssertionError("it synchronizes") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")


def all_options(able: Capabilities, device: str) -> dict[str, object]:
    """Arguments of one full call that uses every option that is claimed."""
    bias = logits_of(device, 1)
    T = torch.tensor([0.0 if able.greedy_rows else 0.5, 1.0] * (len(bias) // 2), device=device)
    arguments = {
        "per_row_temperature": ("temperature", T),
        "bias": ("bias", bias),
        "mask": ("mask", torch.ones_like(bias, dtype=torch.bool)),
        "per_request_seed": ("seed", torch.arange(len(bias), device=device)),
        "logprob": ("return_logprob", True),
        "entropy": ("return_entropy", True),
        "rank": ("return_rank", True),
        "top": ("return_top", 3),
        "num_samples": ("num_samples", 3),
    }
    return dict(arguments[option] for option in arguments if getattr(able, option))


def check_bias(provider: Provider, device: str, dtype: str) -> None:
    """Tokens with a bias are those of the sum of logits and bias."""
    logits = logits_of(device)
    for bias in (logits_of(device, 1)[0], logits_of(device, 2)):
        tokens = drawn(provider, logits, dtype, bias=bias)
        assert torch.equal(tokens, drawn(provider, logits + bias, dtype)), bias.shape


def check_num_samples(provider: Provider, device: str, dtype: str) -> None:
    """Sample n of a row is the oracle's sample n; samplers with other noise have `samples`."""
    logits = logits_of(device)
    tokens = drawn(provider, logits, dtype, num_samples=3)
    assert tokens.shape == (len(logits), 3)
    if (noise := provider.capabilities.noise) is not None:
        for number, column in enumerate(tokens.T):
            counters = (counter(5, device), counter(9, device))
            expected = reference.expect(logits, *counters, 1.0, noise, sample=number)
            assert expected.accepts(column).all(), number


def check_quantized(provider: Provider, device: str, dtype: str) -> None:
    """With a quantized head it draws from the head's numbers, as from a weight of these numbers."""
    shape = (6, 32, 200) if device == "cpu" else (48, 256, 5003)
    for form in provider.capabilities.quantized:
        problem = Problem(*shape, dtype, 0.8, device, "normal:3", weights=form)
        assert provider.unsupported_reason(problem) is None
        hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
        launch = provider.build(problem, quantized(weight, form))
        out = step(launch, hidden)
        check = check_on_problem(provider, problem, launch, hidden, weight)
        assert check.passed, check
        if provider.capabilities.noise or provider.kind is Kind.SCORE:
            plain = provider.build(replace(problem, weights=""), weight)
            assert torch.equal(step(plain, hidden), out)


CHECKS: dict[str, Callable[[Provider, str, str], None]] = {
    "dtypes": check_dtypes,
    "fused": check_fused,
    "graph_safe": check_graph_safe,
    "host_sync_free": check_host_sync_free,
    "bias": check_bias,
    "num_samples": check_num_samples,
    "quantized": check_quantized,
}
"""Capability -> its check here."""

NEED_CUDA = {"graph_safe", "host_sync_free"}
"""Capabilities without a meaning on a CPU."""

NEED_COMPILER = {*NEED_CUDA, "fused"}
"""Capabilities that the interpreter cannot show: it keeps tiles in numpy's memory."""


def require(provider: Provider, check: str, device: str, dtype: str) -> None:
    """Fail unless a sampler passes one check: of CHECKS, or of the battery."""
    if check in CHECKS:
        CHECKS[check](provider, device, dtype)
    else:  # at a temperature whose neglect shows
        setting = Setting(device, dtype, 0.5, weights=form_of(provider))
        (result,) = verify(provider, setting, "ci", [check])
        assert result.passed, result

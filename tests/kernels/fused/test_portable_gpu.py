"""The fused kernel on a GPU: shapes, dtypes, graphs, streams, invariance, memory."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import counter, problem

from fsbench import inputs, reference
from fsbench.errors import CaptureError
from fsbench.graphs import capture
from fsbench.kernels import flash_sample
from fsbench.kernels.configs.portable import BUCKETS, space
from fsbench.kernels.configs.tables import find
from fsbench.kernels.flash_sampling_store import flash_sampling_store
from fsbench.kernels.launch import workspace as _workspace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def assert_accepted(tokens, hidden, weight, seed, offset, noise="group"):
    expected = reference.expect(
        hidden.double() @ weight.double().T,
        seed,
        offset,
        1.0,
        noise,
        logits_error=reference.matmul_error(hidden, weight),
    )
    assert expected.accepts(tokens).all(), (tokens, expected.tokens)


@pytest.mark.parametrize(
    ("D", "dtype"),
    [
        (16, torch.bfloat16),
        (1152, torch.bfloat16),
        (72, torch.float16),  # TMA, but not a multiple of any tile
        (101, torch.bfloat16),  # rows that TMA cannot load
    ],
    ids=str,
)
@pytest.mark.parametrize("V", [1, 2, 127, 128, 129, 1000, 50257])
@pytest.mark.parametrize("B", [1, 3, 16, 17, 64, 65, 200, 256, 1024])
@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_tokens_are_the_oracles(kernel, B, V, D, dtype):
    hidden, weight = problem(B, V, D, dtype)
    seed, offset = counter(-(V**3)), counter(D)
    for noise in ("group", "token") if B in (3, 200) else ("group",):
        sample = flash_sample(hidden, weight, seed=seed, offset=offset, noise=noise, kernel=kernel)
        assert_accepted(sample.tokens, hidden, weight, seed, offset, noise)
        assert sample.valid.all()


@pytest.mark.parametrize("noise", ["group", "token"])
@pytest.mark.parametrize("num_samples", [1, 6])
@pytest.mark.parametrize("B", [1, 20, 64, 100, 256])
@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_all_options_at_once(kernel, B, num_samples, noise):
    """Against the oracle and float64, on logits that the kernel knows exactly."""
    V, rows = 3333, 3500
    generator = torch.Generator("cuda").manual_seed(B)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden, weight = inputs.head_with_logits(3 * normal(min(B, 16), rows), torch.bfloat16, 16)
    hidden = hidden[torch.arange(B, device="cuda") % len(hidden)].contiguous()
    row = torch.arange(B, device="cuda")
    temperature = (row % 4) / 2.0
    bias = normal(B, V).bfloat16()
    allowed = normal(B, V) > 0
    if B > 2:
        allowed[1], allowed[2] = False, row.new_ones(V).cumsum(0) == 78
    seed, offset = row * 3 - 5, row + 2**33
    sample = flash_sample(
        hidden,
        weight,
        temperature=temperature,
        bias=bias,
        mask=allowed,
        seed=seed,
        offset=offset,
        num_samples=num_samples,
        soft_cap=5.0,
        vocab_size=V,
        return_logprob=True,
        return_logz=True,
        noise=noise,
        kernel=kernel,
    )
    logits = reference.processed_logits(
        hidden.double() @ weight[:V].double().T, soft_cap=5.0, bias=bias, mask=allowed
    )
    expected_valid = [B < 3 or number != 1 for number in range(B)]
    assert sample.valid.tolist() == expected_valid
    logz = reference.log_partition(logits, temperature)
    torch.testing.assert_close(
        sample.logz.double(), torch.where(sample.valid, logz, torch.nan),
        atol=1e-4, rtol=0, equal_nan=True,
    )  # fmt: skip
    for number in range(num_samples):
        tokens = sample.tokens.view(B, -1)[:, number]
        expected = reference.expect(
            logits, seed, offset, temperature, noise, sample=number, logits_error=5e-6
        )
        assert expected.accepts(tokens).all()
        logprob = reference.log_probability(logits, tokens.clamp_min(0), temperature)
        torch.testing.assert_close(
            sample.logprob.view(B, -1)[:, number].double(),
            torch.where(sample.valid, logprob, torch.nan),
            atol=1e-4, rtol=0, equal_nan=True,
        )  # fmt: skip


@pytest.mark.parametrize("kernel", ["auto", "portable"])
@pytest.mark.parametrize("B", [16, 256])
@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-3, 0.7, 30.0])
def test_any_temperature(temperature, B, kernel):
    logits = 20 + 10 * torch.randn(16, 2000, device="cuda")
    hidden, weight = inputs.head_with_logits(logits, torch.float16, 64)
    hidden = hidden.repeat(B // 16, 1)
    call = {"temperature": temperature, "seed": counter(1), "kernel": kernel}
    sample = flash_sample(hidden, weight, **call, return_logz=True)
    stored = hidden.float() @ weight.float().T
    expected = reference.expect(stored, counter(1), counter(0), temperature, "group")
    assert expected.accepts(sample.tokens).all()
    logz = torch.logsumexp(stored.double() / (temperature or 1.0), 1)
    torch.testing.assert_close(sample.logz.double(), logz, atol=1e-3, rtol=1e-6)


@pytest.mark.parametrize("D", [1000, 1152, 4096])
def test_logits_and_tokens_are_bitwise_the_same_for_every_config_and_batch(D):
    """The order of summation follows the token, and the tensor cores keep to it."""
    V = 5001
    hidden, weight = problem(256, V, D)
    seed, offset = counter(1), counter(2)
    whole, first = flash_sampling_store(hidden, weight, temperature=1.0, seed=seed, offset=offset)
    for B in BUCKETS:
        part = hidden[:B].contiguous()
        configs = [find("portable", B, D, gpu_name) for gpu_name in ("NVIDIA H200", "untuned")]
        configs += space(B)[:: len(space(B)) // 3]
        if torch.cuda.get_device_capability() == (9, 0):
            configs.append(find("hopper", B, D, "NVIDIA H200"))
        for config in configs:
            tokens, logits = flash_sampling_store(
                part, weight, temperature=1.0, seed=seed, offset=offset, config=config
            )
            assert torch.equal(logits, first[:B]), config
            assert torch.equal(tokens, whole[:B]), config
            sample = flash_sample(part, weight, seed=seed, offset=offset, config=config)
            assert torch.equal(sample.tokens, whole[:B]), config


def test_torch_compile_captures_the_operator():
    hidden, weight = problem(20, 3000, 128)
    seed, offset = counter(3), counter(4)

    def step(hidden):
        sample = flash_sample(hidden * 2, weight, seed=seed, offset=offset, return_logprob=True)
        return sample.tokens + 1, sample.logprob

    tokens, logprob = torch.compile(step, fullgraph=True)(hidden)
    expected_tokens, expected_logprob = step(hidden)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprob, expected_logprob)


def test_a_weight_of_more_than_2_to_31_elements():
    hidden, weight = problem(2, 2**31 // 4096 + 300, 4096)
    seed, offset = counter(1), counter(2)
    # The last rows alone can win: an address that wraps around would not find them.
    weight[: 2**31 // 4096].mul_(0.01)
    weight[2**31 // 4096 :].mul_(20)
    sample = flash_sample(hidden, weight, seed=seed, offset=offset)
    assert (sample.tokens >= 2**31 // 4096).all()
    logits = hidden.float() @ weight.float().T
    expected = reference.expect(
        logits, seed, offset, 1.0, "group", logits_error=reference.matmul_error(hidden, weight)
    )
    assert expected.accepts(sample.tokens).all()


def test_ten_thousand_replays_leave_the_workspace_as_it_was():
    hidden, weight = problem(33, 2000, 64)
    seed, offset = counter(3), counter(0)
    replay = capture(
        lambda h, s, o: flash_sample(h, weight, seed=s, offset=o).tokens, hidden, seed, offset
    )
    for _ in range(10_000):
        offset.add_(1)
        tokens = replay()
    assert int(offset) == 10_000
    assert_accepted(tokens, hidden, weight, seed, offset)


def test_two_graphs_replayed_at_once():
    problems = [problem(64, 30_000, 512), problem(64, 30_001, 512)]
    seed, offset = counter(4), counter(8)
    replays = []
    for hidden, weight in problems:

        def launch(hidden, seed, offset, weight=weight):
            return flash_sample(hidden, weight, seed=seed, offset=offset).tokens

        replays.append(capture(launch, hidden, seed, offset))
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    tokens = [None, None]
    for _ in range(200):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                tokens[number] = replays[number]()
    torch.cuda.synchronize()
    for (hidden, weight), got in zip(problems, tokens, strict=True):
        assert_accepted(got, hidden, weight, seed, offset)


def test_a_capture_without_a_spare_workspace_says_what_to_do(monkeypatch):
    hidden, weight = problem(8, 500, 64)
    seed, offset = counter(4), counter(8)
    flash_sample(hidden, weight, seed=seed, offset=offset)
    monkeypatch.setattr(_workspace, "_pool", {})
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="launch once outside"), torch.cuda.graph(graph):
        flash_sample(hidden, weight, seed=seed, offset=offset)


def test_no_host_sync_and_no_logits_in_memory():
    hidden, weight = problem(256, 151_936, 512)
    seed, offset = counter(1), counter(1)
    flash_sample(hidden, weight, seed=seed, offset=offset)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_sample(hidden, weight, seed=seed, offset=offset)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    extra = torch.cuda.max_memory_allocated() - before + _workspace.held_bytes(hidden.device)
    assert extra <= 2**20


def test_outputs_are_written_whatever_the_allocator_hands_out():
    hidden, weight = problem(100, 777, 64)
    seed, offset = counter(1), counter(1)
    first = flash_sample(hidden, weight, seed=seed, offset=offset)
    tokens = first.tokens.clone()
    first.tokens.fill_(-777)
    first.valid.fill_(False)
    del first  # the next call gets this memory back
    second = flash_sample(hidden, weight, seed=seed, offset=offset)
    assert second.tokens.tolist() == tokens.tolist()
    assert second.valid.all()


def test_many_graphs_can_be_captured_after_one_launch():
    """As an engine does: one graph for every batch size."""
    hidden, weight = problem(256, 2000, 64)
    seed, offset = counter(4), counter(8)
    for B in (16, 32, 64, 128, 256):  # compile
        flash_sample(hidden[:B], weight, seed=seed, offset=offset)
    graphs = []
    for B in [*range(1, 9), *range(16, 257, 8)]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = flash_sample(hidden[:B], weight, seed=seed, offset=offset).tokens
        graphs.append((B, graph, tokens))
    for B, graph, tokens in graphs:
        graph.replay()
        assert_accepted(tokens, hidden[:B], weight, seed, offset)

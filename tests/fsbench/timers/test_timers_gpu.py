"""The GPU timers against each other, against known steps and against FlashInfer's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from statistics import median

import pytest
import torch

from fsbench.errors import FsbenchError
from fsbench.kernels import flash_sample
from fsbench.machine import device_state, hardware
from fsbench.machine.environment import environment
from fsbench.timers import gpu, make_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

needs_cupti = pytest.mark.skipif(
    importlib.util.find_spec("cupti") is None, reason="cupti-python is not installed"
)

# A matmul that streams 1.24 GB of weight: about 300 us on an H200.
B, D, V = 64, 4096, 151936

TOLERANCE = 0.05


def nothing() -> None:
    pass


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """The replay of a CUDA graph of `step`, warmed up."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    # A graph holds addresses only: the default keeps the step's tensors alive.
    return lambda step=step: graph.replay()


@pytest.fixture(scope="module")
def matmul() -> Callable[[], None]:
    hidden = torch.randn(B, D, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(V, D, dtype=torch.bfloat16, device="cuda")
    logits = torch.empty(B, V, dtype=torch.bfloat16, device="cuda")
    return captured(lambda: torch.mm(hidden, weight.T, out=logits))


def two_kernels() -> Callable[[], None]:
    x = torch.rand(1 << 22, device="cuda")
    y = torch.empty_like(x)

    def step() -> None:
        torch.sin(x, out=y)
        torch.cos(y, out=x)

    return step


@needs_cupti
def test_cupti_and_events_agree_on_one_kernel():
    """On the fused sampler, which is one kernel (cuBLAS clears a workspace first)."""
    hidden = torch.randn(B, D, dtype=torch.bfloat16, device="cuda")
    weight = torch.randn(V, D, dtype=torch.bfloat16, device="cuda")
    seed, offset = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    step = captured(lambda: flash_sample(hidden, weight, seed=seed, offset=offset))
    cupti = make_timer("cupti", "cuda").measure(step, 50, nothing)
    events = make_timer("events", "cuda").measure(step, 50, nothing)
    assert cupti.n_kernels == 1, cupti.kernels
    assert len(cupti.span_us) == len(events.span_us) == 50
    assert median(events.span_us) == pytest.approx(median(cupti.span_us), rel=TOLERANCE)


@needs_cupti
@pytest.mark.parametrize("replay", [False, True], ids=["eager", "graph"])
def test_a_step_of_two_kernels(replay):
    step = captured(two_kernels()) if replay else two_kernels()
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    measured = make_timer("cupti", "cuda").measure(step, 20, lambda: offset.add_(1))
    assert measured.n_kernels == 2, measured.kernels  # neither the flush nor the offset's kernel
    assert len(measured.kernels) == 2
    assert int(offset) == 20
    for span, busy, total in zip(measured.span_us, measured.busy_us, measured.sum_us, strict=True):
        assert 0 < busy <= span
        assert busy <= total
    assert sum(measured.kernels.values()) == pytest.approx(sum(measured.sum_us) / 20)


@needs_cupti
def test_copies_and_memsets_are_counted():
    x = torch.rand(1 << 20, device="cuda")
    y = torch.empty_like(x)
    measured = make_timer("cupti", "cuda").measure(lambda: y.copy_(x), 5, nothing)
    assert measured.n_kernels == 1
    assert list(measured.kernels) == ["memcpy"]


@needs_cupti
def test_cupti_survives_hundreds_of_measurements():
    timer = make_timer("cupti", "cuda", l2="warm")
    eager = two_kernels()
    replay = captured(eager)
    for number in range(300):
        measured = timer.measure(replay if number % 2 else eager, 2, nothing)
        assert measured.n_kernels == 2
        assert len(measured.span_us) == 2
    with pytest.raises(FsbenchError, match="no GPU activity in iteration 0"):
        timer.measure(nothing, 2, nothing)


@needs_cupti
@pytest.mark.parametrize("state", ["cold", "cold-write"])
def test_the_flush_takes_the_data_out_of_l2(state):
    l2_bytes = torch.cuda.get_device_properties("cuda").L2_cache_size
    x = torch.zeros(l2_bytes // 3 // 4096, 1024, device="cuda")  # a third of the cache
    sums = torch.empty(x.shape[0], device="cuda")
    step = captured(lambda: torch.sum(x, dim=1, out=sums))
    cold = make_timer("cupti", "cuda", l2=state).measure(step, 50, nothing)
    warm = make_timer("cupti", "cuda", l2="warm").measure(step, 50, nothing)
    assert median(cold.span_us) > 1.15 * median(warm.span_us)


def test_the_read_flush_allocates_nothing():
    from fsbench.timers.gpu.l2 import L2Flush

    flush = L2Flush("cold", "cuda")
    flush()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flush()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before


def test_events_see_the_device_and_not_the_launch():
    """A tiny kernel launched eagerly takes the host longer than the device."""
    x = torch.zeros(1, device="cuda")
    measured = make_timer("events", "cuda").measure(lambda: x.add_(1), 50, nothing)
    assert 0 < median(measured.span_us) < 20
    assert (measured.busy_us, measured.n_kernels) == ([], None)


# FlashInfer calls cupti.finalize(), which would end CUPTI for this process too. It flushes by
# writing, so it is compared with our cold-write.
FLASHINFER = f"""
import statistics, warnings
import torch
from flashinfer.testing import bench_gpu_time
hidden = torch.randn({B}, {D}, dtype=torch.bfloat16, device="cuda")
weight = torch.randn({V}, {D}, dtype=torch.bfloat16, device="cuda")
logits = torch.empty({B}, {V}, dtype=torch.bfloat16, device="cuda")
with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*[Ff]alling back.*")
    times_ms = bench_gpu_time(
        lambda: torch.mm(hidden, weight.T, out=logits), dry_run_iters=10, repeat_iters=50,
        enable_cupti=True, use_cuda_graph=True, cold_l2_cache=True,
    )
print("median_us", statistics.median(times_ms) * 1e3)
"""


@needs_cupti
@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed"
)
def test_cupti_agrees_with_flashinfer(matmul):
    measured = make_timer("cupti", "cuda", l2="cold-write").measure(matmul, 50, nothing)
    done = subprocess.run([sys.executable, "-c", FLASHINFER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reference = float(done.stdout.split("median_us")[1].split()[0])
    assert median(measured.span_us) == pytest.approx(reference, rel=TOLERANCE)


def test_nvml_index_is_the_gpu_that_torch_uses():
    index = device_state.nvml_index(torch.cuda.current_device())
    assert index is not None, hardware.nvml_problem()
    gpu = next(gpu for gpu in hardware.gpus() if gpu.index == index)
    assert gpu.name == torch.cuda.get_device_name()
    state = hardware.clocks(index)
    assert 100 < state["sm_mhz"] < 5000
    assert 0 < state["power_w"] < 2000
    assert isinstance(state["throttle"], list)


def test_the_environment_of_a_gpu_run():
    record = environment("cuda", [])
    assert (record["device"], record["gpu"]) == ("cuda", torch.cuda.get_device_name())
    assert record["driver"] and record["cuda"]


def test_the_clock_of_the_counters_is_nvmls(matmul):
    index = device_state.nvml_index(torch.cuda.current_device())
    clock = gpu.sm_clock.SmClock()
    for _ in range(1000):
        matmul()
    before = clock.read()
    for _ in range(1000):
        matmul()
    after = clock.read()
    assert gpu.sm_clock.mean_mhz(before, after) == pytest.approx(
        hardware.clocks(index)["sm_mhz"], rel=0.1
    )

"""Measurements in addition to time, on a GPU: kernels by their real names, forms, and energy."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch

from fsbench.discover import discover
from fsbench.inputs import make_hidden, make_weight
from fsbench.machine import device_state, hardware
from fsbench.measure import loops, runner
from fsbench.measure.plan import Plan
from fsbench.measure.recorder import Recorder
from fsbench.measure.runner import Runner
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.records.breakdown import Part, kernel_rows, split
from fsbench.records.store import Store, read_records
from fsbench.timers import make_timer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SHAPE = Problem(16, 1024, 32000, "bf16")
BY_NAME = discover()
AVAILABLE = [
    entry
    for entry in BY_NAME.values()
    if not entry.refusal(SHAPE) and entry.provider.kind is Kind.EXACT
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory):
    """Every exact sampler that runs here, with its forms and its energy."""
    if importlib.util.find_spec("cupti") is None:
        pytest.skip("cupti-python is not installed")
    folder: Path = tmp_path_factory.mktemp("profile") / "run"
    store = Store.create(folder, {})
    plan = Plan(
        [SHAPE], AVAILABLE, warmup=3, iters=20, rounds=2, check=False, forms=True, energy_s=0.5
    )
    index = device_state.nvml_index(torch.cuda.current_device())
    Runner(plan, Recorder(store), make_timer("cupti", "cuda"), "", index).run()
    store.close()
    return {record.cell.provider: record for record in read_records(folder)}


@pytest.mark.parametrize("name", [entry.name for entry in AVAILABLE])
def test_every_kernel_has_a_class(records, name):
    record = records[name]
    assert record.status == "ok", record.reason
    assert not record.lacks
    breakdown = split(record)
    if breakdown is None:  # neither names nor a form separate the parts of a fused kernel
        assert not record.forms
        return
    assert breakdown.matmul_us > 0
    if breakdown.method == "names":
        kernels = kernel_rows([record])
        assert not list(kernels[kernels["part"] == Part.UNKNOWN]["kernel"])
        assert breakdown.sampling_us > 0 or name == "simple_offload"  # which draws on the CPU


@pytest.mark.parametrize("name", [entry.name for entry in AVAILABLE])
def test_energy_is_within_what_the_gpu_can_draw(records, name):
    energy = records[name].energy
    watts = energy.joules / energy.seconds
    assert 0 < energy.idle_w < 1000 and 0 < watts < 1000
    if BY_NAME[
        name
    ].provider.capabilities.graph_safe:  # others leave the GPU idle for most of a step
        assert energy.idle_w < watts
    assert 0.3 < energy.seconds < 0.8


def test_energy_agrees_with_power_and_time():
    """Of a loop of matmuls: the counter's joules against NVML's power, read meanwhile."""
    problem = Problem(64, 4096, 151936, "bf16")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    offset = torch.zeros(1, dtype=torch.int64, device="cuda")
    index = device_state.nvml_index(torch.cuda.current_device())
    watts = []

    def counter():
        watts.append(hardware.clocks(index)["power_w"])
        return hardware.energy_mj(index)

    queue = partial(runner.queue_steps, lambda: hidden @ weight.T, offset, "cuda", True)
    energy = loops.run_loop(queue, counter, 2.0, 0.0)
    assert energy.joules / energy.seconds == pytest.approx(watts[-1], rel=0.15)


@pytest.mark.parametrize("entry", [entry for entry in AVAILABLE if entry.provider.matmul_form])
def test_the_matmul_form_computes_the_logits(entry):
    problem = Problem(17, 1024, 32000, "bf16")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    unread = torch.zeros(1, dtype=torch.int64, device="cuda")
    largest = entry.provider.matmul_form(problem, weight)(hidden, unread, unread).amax(0)
    expected = (hidden.float() @ weight.float().T).amax(1)
    torch.testing.assert_close(largest, expected, atol=1e-2, rtol=1e-2)

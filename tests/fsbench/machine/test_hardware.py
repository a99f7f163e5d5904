"""GPUs through a double of NVML, and the CPU's name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
import torch

from fsbench.machine import device_state, hardware


class NvmlError(Exception):
    pass


class FakeNvml:
    """Two GPUs; `refuse` names the queries that are not supported."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self) -> None:
        for name in vars(pynvml):  # the real bits
            if name.startswith("nvmlClocksEventReason"):
                setattr(self, name, getattr(pynvml, name))
        self.refuse: set[str] = set()
        self.reasons = 0x1

    def __getattr__(self, query: str):
        answers = {
            "nvmlSystemGetDriverVersion": lambda: "580.159",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}{handle}",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150_000_000_000),
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetCudaComputeCapability": lambda handle: [9, 0],
            "nvmlDeviceGetPowerUsage": lambda handle: 612_500,
            "nvmlDeviceGetTotalEnergyConsumption": lambda handle: 123_456 + handle,
            "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: self.reasons,
        }
        if query in self.refuse:
            return self._refused
        return answers[query]

    def _refused(self, *arguments):
        raise NvmlError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    double = FakeNvml()
    monkeypatch.setattr(hardware, "_nvml", lambda: (double, ""))
    return double


def test_gpus(nvml):
    assert hardware.nvml_problem() is None
    assert hardware.gpus() == [
        hardware.Gpu(0, "NVIDIA H200", "GPU-00", 150_000_000_000, "580.159", (9, 0)),
        hardware.Gpu(1, "NVIDIA H200", "GPU-11", 150_000_000_000, "580.159", (9, 0)),
    ]


def test_one_query_that_is_not_supported_costs_only_its_answer(nvml):
    nvml.refuse = {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPowerUsage"}
    nvml.refuse.add("nvmlDeviceGetCurrentClocksEventReasons")
    assert [gpu.memory_bytes for gpu in hardware.gpus()] == [None, None]
    state = hardware.clocks(0)
    assert state["power_w"] is None and state["throttle"] == []
    assert (state["sm_mhz"], state["mem_mhz"], state["temperature_c"]) == (1980, 3201, 41)


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x0, []),
        (0x1, []),
        (0x5, ["sw_power_cap"]),
        (0x48, ["hw_slowdown", "hw_thermal_slowdown"]),
    ],
)
def test_idleness_is_no_throttle_reason(nvml, reasons, names):
    nvml.reasons = reasons
    assert hardware.clocks(1)["throttle"] == names
    assert hardware.clocks(1)["power_w"] == 612.5


def test_torch_and_nvml_count_gpus_differently(nvml, monkeypatch):
    # CUDA_VISIBLE_DEVICES=1: torch's device 0 is NVML's 1. torch gives UUIDs without "GPU-".
    uuid = {0: "11", 1: "mig"}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid[device])
    )
    assert device_state.nvml_index(0) == 1
    assert device_state.nvml_index(1) is None
    assert hardware.clocks(device_state.nvml_index(1)) == {}


def test_without_a_driver_there_are_no_gpus_and_a_reason(monkeypatch):
    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    monkeypatch.setattr(hardware, "_nvml", hardware._nvml.__wrapped__)
    assert hardware.gpus() == []
    assert hardware.clocks(0) == {}
    assert hardware.energy_mj(0) is None
    assert hardware.nvml_problem() == "NVML: Driver Not Loaded"
    monkeypatch.setattr(hardware, "pynvml", None)
    assert hardware.gpus() == []
    assert "pip install nvidia-ml-py" in (hardware.nvml_problem() or "")


def test_cpu_name(monkeypatch):
    text = "processor\t: 0\nmodel name\t: AMD EPYC 9654: 96-Core\nmodel name\t: other\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert hardware.cpu_name() == "AMD EPYC 9654: 96-Core"
    monkeypatch.setattr(Path, "read_text", lambda path: "processor : 0\n")
    assert hardware.cpu_name()  # an Arm machine: the architecture at least


def test_energy_is_the_counter_of_the_gpu_in_millijoules(nvml):
    assert hardware.energy_mj(1) == 123_457
    assert hardware.energy_mj(None) is None
    nvml.refuse = {"nvmlDeviceGetTotalEnergyConsumption"}
    assert hardware.energy_mj(1) is None

"""The GPUs and the CPU of this machine. GPUs are queried through NVML, without torch."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

try:
    import pynvml
except ImportError:
    pynvml = None

_EVENT_REASONS = {
    "ApplicationsClocksSetting": "applications_clocks",
    "SwPowerCap": "sw_power_cap",
    "HwSlowdown": "hw_slowdown",
    "SyncBoost": "sync_boost",
    "SwThermalSlowdown": "sw_thermal_slowdown",
    "HwThermalSlowdown": "hw_thermal_slowdown",
    "HwPowerBrakeSlowdown": "hw_power_brake_slowdown",
    "DisplayClockSetting": "display_clock",
}
"""NVML's name of a clock event reason -> name in records. Idleness is left out."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML counts them: `index` ignores CUDA_VISIBLE_DEVICES (device_state.nvml_index)."""

    index: int
    name: str
    uuid: str
    memory_bytes: int | None
    driver: str
    compute_capability: tuple[int, int] | None = None


@cache
def _nvml() -> tuple[Any, str]:
    """(pynvml, initialized once per process; "") or (None, why it cannot be used)."""
    if pynvml is None:
        return None, "No module named 'pynvml'; pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return pynvml, ""


def _ask(query: str, *arguments: Any) -> Any:
    """Return the answer of an NVML query, None if the GPU or driver does not support it."""
    nvml, _ = _nvml()
    try:
        return getattr(nvml, query)(*arguments)
    except nvml.NVMLError:
        return None


def nvml_problem() -> str | None:
    """Return why NVML cannot be used (no driver, no package), None if it can."""
    return _nvml()[1] or None


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine; [] if NVML cannot be used (see `nvml_problem`)."""
    nvml, _ = _nvml()
    if nvml is None:
        return []
    driver = _ask("nvmlSystemGetDriverVersion") or ""
    devices = []
    for index in range(_ask("nvmlDeviceGetCount") or 0):
        handle = _ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # off the bus, or not visible to this process
            continue
        name = _ask("nvmlDeviceGetName", handle) or ""
        uuid = _ask("nvmlDeviceGetUUID", handle) or ""
        memory = _ask("nvmlDeviceGetMemoryInfo", handle)
        capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
        devices.append(
            Gpu(
                index,
                name,
                uuid,
                memory.total if memory else None,
                driver,
                tuple(capability) if capability else None,
            )
        )
    return devices


def energy_mj(index: int | None) -> int | None:
    """Return the energy that a GPU has used since its driver was loaded, mJ; None if unknown.

    NVML advances the counter every few tens of milliseconds. index: NVML's.
    """
    nvml, _ = _nvml()
    handle = None if nvml is None or index is None else _ask("nvmlDeviceGetHandleByIndex", index)
    return None if handle is None else _ask("nvmlDeviceGetTotalEnergyConsumption", handle)


def clocks(index: int | None) -> dict[str, Any]:
    """Return the state of the GPU with this NVML index; {} without one.

    Keys: sm_mhz, mem_mhz, power_w, temperature_c (each None if not supported), and throttle: the
    reasons that hold clocks down, without idleness.
    """
    nvml, _ = _nvml()
    handle = None if nvml is None or index is None else _ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return {}
    milliwatts = _ask("nvmlDeviceGetPowerUsage", handle)
    reasons = _ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
    return {
        "sm_mhz": _ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "mem_mhz": _ask("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        "power_w": None if milliwatts is None else milliwatts / 1e3,
        "temperature_c": _ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle": [
            name
            for reason, name in _EVENT_REASONS.items()
            if reasons & getattr(nvml, f"nvmlClocksEventReason{reason}")
        ],
    }


def cpu_name() -> str:
    """Return the CPU's marketing name, or at least its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()

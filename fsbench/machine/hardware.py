"""The GPUs and the CPU of this machine. GPUs are asked through NVML, so torch is not needed."""

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
"""NVML's name of a clock event reason -> ours. Idle is none: it only says that nothing runs."""


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
    """The answer of one NVML query, or None where this GPU or driver does not support it."""
    nvml, _ = _nvml()
    try:
        return getattr(nvml, query)(*arguments)
    except nvml.NVMLError:
        return None


def nvml_problem() -> str | None:
    """Why NVML cannot be used here (no driver, no package), or None if it can."""
    return _nvml()[1] or None


def gpus() -> list[Gpu]:
    """Every GPU of this machine; none where NVML cannot be used (`nvml_problem` says why)."""
    nvml, _ = _nvml()
    if nvml is None:
        return []
    driver = _ask("nvmlSystemGetDriverVersion") or ""
    found = []
    for index in range(_ask("nvmlDeviceGetCount") or 0):
        handle = _ask("nvmlDeviceGetHandleByIndex", index)
        if handle is None:  # fallen off the bus, or not ours to see
            continue
        name = _ask("nvmlDeviceGetName", handle) or ""
        uuid = _ask("nvmlDeviceGetUUID", handle) or ""
        memory = _ask("nvmlDeviceGetMemoryInfo", handle)
        capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
        found.append(
            Gpu(
                index,
                name,
                uuid,
                memory.total if memory else None,
                driver,
                tuple(capability) if capability else None,
            )
        )
    return found


def energy_mj(index: int | None) -> int | None:
    """Energy that the GPU with this NVML index has used since its driver was loaded, mJ.

    NVML advances it every few tens of milliseconds. None where there is no such counter.
    """
    nvml, _ = _nvml()
    handle = None if nvml is None or index is None else _ask("nvmlDeviceGetHandleByIndex", index)
    return None if handle is None else _ask("nvmlDeviceGetTotalEnergyConsumption", handle)


def clocks(index: int | None) -> dict[str, Any]:
    """The state of the GPU with this NVML index, now; {} if there is none (index None, no NVML).

    sm_mhz, mem_mhz, power_w, temperature_c, each None where not supported, and throttle: names of
    the reasons that hold clocks down, idleness apart.
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
    """The CPU's marketing name, or what the platform knows (the architecture, at least)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()

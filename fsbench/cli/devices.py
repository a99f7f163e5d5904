"""Device and timer of a command."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fsbench.cli.options import one_of, option
from fsbench.errors import DeviceUnavailable


def _timers() -> Iterable[str]:
    from fsbench.timers import TIMERS

    return TIMERS


Timer = Annotated[str, option("--timer", one_of(_timers), "auto, cupti, events, cpu or fake.")]


def device_to_use(name: str) -> str:
    """Return cuda or cpu for a value of --device; for auto, cuda if torch sees a GPU."""
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise DeviceUnavailable(
            "--device cuda: torch sees no CUDA device; `fsbench doctor` says why"
        )
    return "cpu"


def require_gpus(indices: list[int]) -> None:
    """Raise DeviceUnavailable unless torch sees a GPU with each of these indices of --gpu."""
    import torch

    count = torch.cuda.device_count()
    if max(indices) >= count:
        raise DeviceUnavailable(f"--gpu: expected indices below {count}; got {max(indices)}")


def require_energy(device: str, indices: list[int]) -> None:
    """Raise DeviceUnavailable unless NVML counts the energy of these GPUs."""
    from fsbench.machine import hardware
    from fsbench.machine.device_state import nvml_index

    gpu_indices = [nvml_index(index) for index in indices] if device == "cuda" else [None]
    if any(hardware.energy_mj(index) is None for index in gpu_indices):
        raise DeviceUnavailable(
            "--energy: needs a GPU whose counter of energy NVML can read; see `fsbench doctor`"
        )

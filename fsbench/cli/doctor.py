"""`fsbench doctor`: check what `fsbench run` needs on this machine, and print fixes.

Each check is a function without arguments that returns one DoctorCheck and changes nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from fsbench.cli.options import Json
from fsbench.errors import DeviceUnavailable, ProviderUnavailable, TimerUnavailable
from fsbench.machine import hardware
from fsbench.machine.packages import package_version

_GPU_EXTRA = "pip install -e '.[gpu]'"
_WITHOUT_GPU = "not needed without an NVIDIA GPU"
_STYLES = {"ok": "green", "missing": "bold red", "warning": "yellow"}
_ENOUGH_BYTES = 8e9  # the paper's larger head has 2.1 GB; logits, copies and the flush need more


@dataclass(frozen=True)
class DoctorCheck:
    """One line of `fsbench doctor`. fix: a command or advice; empty if the status is ok."""

    name: str
    status: Literal["ok", "missing", "warning"]
    detail: str
    fix: str = ""


def _torch() -> Any:
    """Return the torch module, or None if it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError):  # OSError: a CUDA library of the wheel does not load
        return None
    return torch


def _sees_cuda() -> bool:
    torch = _torch()
    return torch is not None and torch.cuda.is_available()


def check_python() -> DoctorCheck:
    """Report the version of Python; versions before 3.11 cannot import this package."""
    return DoctorCheck("python", "ok", platform.python_version())


def check_torch() -> DoctorCheck:
    """Check that torch can be imported, and that it sees the GPU of this machine."""
    torch = _torch()
    missing = partial(DoctorCheck, "torch", "missing")
    if torch is None:
        return missing("cannot be imported", "pip install 'torch>=2.11'")
    built = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    if _sees_cuda() or not hardware.gpus():
        return DoctorCheck("torch", "ok", built)
    if torch.version.cuda is None:
        index = "https://download.pytorch.org/whl/cu130"
        fix = f"pip install --force-reinstall torch --index-url {index}"
        return missing(f"{built}: the GPU is not used", fix)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        detail = f"{built}: sees no GPU, CUDA_VISIBLE_DEVICES={hidden!r}"
        return missing(detail, "unset CUDA_VISIBLE_DEVICES")
    detail = f"{built}: sees no GPU with driver {hardware.gpus()[0].driver}"
    return missing(detail, "update the NVIDIA driver (CUDA 13 needs 580 or newer)")


def check_nvml() -> DoctorCheck:
    """Check NVML; without it GPUs run, but clocks and throttling are not recorded."""
    problem = hardware.nvml_problem()
    if problem is None:
        return DoctorCheck("nvml", "ok", f"nvidia-ml-py {package_version('nvidia-ml-py')}")
    if package_version("nvidia-ml-py") is None:
        return DoctorCheck("nvml", "missing", problem, "pip install nvidia-ml-py")
    fix = "install the NVIDIA driver, until nvidia-smi works"
    return DoctorCheck("nvml", "warning", problem, fix)


def check_gpu() -> DoctorCheck:
    """Check that this machine has an NVIDIA GPU; report its driver."""
    gpus = hardware.gpus()
    if not gpus:
        detail = "no NVIDIA GPU found: `fsbench run` measures the samplers that run on CPUs"
        return DoctorCheck("gpu", "warning", detail, "run on a machine with an NVIDIA GPU")
    names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)
    return DoctorCheck("gpu", "ok", f"{names}; driver {gpus[0].driver}")


def check_compute_capability() -> DoctorCheck:
    """Check for compute capability >= 8.0 (bf16 tensor cores) of all GPUs that torch sees."""
    if not _sees_cuda():
        return DoctorCheck("capability", "warning", "torch sees no CUDA device")
    torch = _torch()
    capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if min(capabilities) < (8, 0):
        detail = f"{names}: the kernels need 8.0 (A100) or newer"
        fix = "choose another GPU with fsbench run --gpu"
        return DoctorCheck("capability", "missing", detail, fix)
    return DoctorCheck("capability", "ok", names)


def check_gpu_memory() -> DoctorCheck:
    """Check the free memory of all GPUs that torch sees."""
    if not _sees_cuda():
        return DoctorCheck("gpu memory", "warning", "torch sees no CUDA device")
    torch = _torch()
    free = [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
    detail = ", ".join(f"{index}: {size / 1e9:.1f} GB free" for index, size in enumerate(free))
    if min(free) < _ENOUGH_BYTES:
        fix = "nvidia-smi  # shows which process holds it"
        return DoctorCheck("gpu memory", "warning", detail, fix)
    return DoctorCheck("gpu memory", "ok", detail)


def check_triton() -> DoctorCheck:
    """Check for Triton >= 3.6, in which the fused kernels are written."""
    return _at_least("triton", "triton", "3.6", "pip install 'triton>=3.6'")


def check_flashinfer() -> DoctorCheck:
    """Check for FlashInfer >= 0.6.9, the strongest baseline of the paper."""
    return _at_least("flashinfer", "flashinfer-python", "0.6.9", _GPU_EXTRA)


def check_nvcc() -> DoctorCheck:
    """Check for nvcc, with which FlashInfer compiles at first use, or for its prebuilt kernels."""
    prebuilt = package_version("flashinfer-jit-cache")
    if prebuilt:
        return DoctorCheck("nvcc", "ok", f"not needed: flashinfer-jit-cache {prebuilt}")
    # The places in which FlashInfer looks, in this order.
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    on_path = None if home else shutil.which("nvcc")
    nvcc = Path(on_path or Path(home or "/usr/local/cuda", "bin", "nvcc"))
    if nvcc.exists():
        return DoctorCheck("nvcc", "ok", str(nvcc))
    if not hardware.gpus():
        return DoctorCheck("nvcc", "warning", f"no {nvcc}; {_WITHOUT_GPU}")
    install = "pip install flashinfer-jit-cache --index-url https://flashinfer.ai/whl/cu130"
    fix = f"{install}  # or install the CUDA toolkit and set CUDA_HOME"
    return DoctorCheck("nvcc", "missing", f"no {nvcc}: FlashInfer cannot compile its kernels", fix)


def check_cupti() -> DoctorCheck:
    """Check CUPTI for Python, the default timer, by creating a timer if there is a GPU."""
    version = package_version("cupti-python")
    if version is None:
        return _absent("cupti", _GPU_EXTRA)
    if not _sees_cuda():
        return DoctorCheck("cupti", "ok", f"{version} (not tried: torch sees no CUDA device)")
    from fsbench.timers import make_timer

    try:
        make_timer("cupti", "cuda", l2="warm")
    except TimerUnavailable as error:
        return DoctorCheck("cupti", "missing", str(error), "fsbench run --timer events")
    return DoctorCheck("cupti", "ok", version)


def check_cpu_samplers() -> DoctorCheck:
    """Check the C++ core of the CPU samplers, built at installation if there is a compiler."""
    from fsbench.simple import native

    fix = "install g++ (or another C++ compiler), then fsbench again: pip install -e ."
    try:
        return DoctorCheck("cpu core", "ok", f"C++ core built, {native.isa()}")
    except ProviderUnavailable as error:
        return DoctorCheck("cpu core", "missing", str(error), fix)


def check_output() -> DoctorCheck:
    """Check that results can be written in the current folder."""
    folder = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        detail = f"cannot write in {folder}: {error.strerror}"
        fix = "fsbench run --out DIR  # a folder you may write"
        return DoctorCheck("output", "warning", detail, fix)
    return DoctorCheck("output", "ok", f"{folder} is writable")


def _at_least(name: str, distribution: str, least: str, fix: str) -> DoctorCheck:
    """Check that a distribution is installed in version `least` or newer."""
    version = package_version(distribution)
    if version is None:
        return _absent(name, fix)
    installed, needed = ([int(n) for n in re.findall(r"\d+", each)] for each in (version, least))
    if installed < needed:
        return DoctorCheck(name, "missing", f"{version} is older than {least}", fix)
    return DoctorCheck(name, "ok", version)


def _absent(package: str, fix: str) -> DoctorCheck:
    """Return the check of a package that is not installed and that only GPUs need."""
    if hardware.gpus():
        return DoctorCheck(package, "missing", "not installed", fix)
    return DoctorCheck(package, "warning", f"not installed; {_WITHOUT_GPU}", fix)


CHECKS: tuple[Callable[[], DoctorCheck], ...] = (
    check_python,
    check_torch,
    check_nvml,
    check_gpu,
    check_compute_capability,
    check_gpu_memory,
    check_triton,
    check_flashinfer,
    check_nvcc,
    check_cupti,
    check_cpu_samplers,
    check_output,
)


def diagnose() -> list[DoctorCheck]:
    """Run every check, in the order in which problems should be fixed."""
    return [check() for check in CHECKS]


def runnable(checks: list[DoctorCheck]) -> list[tuple[str, str]]:
    """Return (command, purpose) for the commands that can run on this machine."""
    if _torch() is None:
        return []
    missing = {check.name for check in checks if check.status == "missing"}
    if _sees_cuda() and not missing & {"capability", "triton"}:
        runs = ("fsbench run --preset quick", "measure the samplers on this GPU")
    else:
        runs = ("fsbench run --preset smoke", "measure the samplers that run on CPUs")
    commands = [runs, ("fsbench verify", "check that samplers draw from the right distribution")]
    if _sees_cuda() and package_version("vllm"):
        commands.append(("fsbench e2e --engine vllm", "measure time per token in vLLM"))
    elif package_version("transformers"):
        commands.append(("fsbench e2e", "measure time per token in a Hugging Face model"))
    return [*commands, ("fsbench list", "show samplers, models, presets and GPUs")]


def doctor(as_json: Json = False) -> None:
    """Check what `fsbench run` needs on this machine; print fixes and what you can run now.

    Exit code 0 if anything can be measured here, if only on the CPU; 4 if nothing can.
    """
    checks = diagnose()
    commands = runnable(checks)
    if as_json:
        facts = {
            "can_run": bool(commands),
            "checks": [asdict(check) for check in checks],
            "commands": [command for command, _ in commands],
        }
        print(json.dumps(facts, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for check in checks:
            line = Text.assemble(
                (f"{check.status:<8}", _STYLES[check.status]), f"{check.name:<12}{check.detail}"
            )
            if check.fix:
                line.append(f"  ->  {check.fix}", style="bold")
            console.print(line)
        if commands:
            console.print("\nYou can run now:", style="bold")
        for command, purpose in commands:
            console.print(f"  {command:<28}{purpose}")
    if not commands:
        raise typer.Exit(DeviceUnavailable.exit_code)

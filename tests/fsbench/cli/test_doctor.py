"""`fsbench doctor` and its checks, on machines made up by monkeypatching."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.cli import doctor as diagnosis
from fsbench.cli.doctor import DoctorCheck
from fsbench.errors import ProviderUnavailable, TimerUnavailable
from fsbench.machine import hardware

H200 = hardware.Gpu(0, "NVIDIA H200", "GPU-0", 150_000_000_000, "580.159")
VERSIONS = {
    "triton": "3.6.0",
    "flashinfer-python": "0.6.9",
    "cupti-python": "13.0.1",
    "nvidia-ml-py": "13.580",
}


@pytest.fixture
def box(monkeypatch, tmp_path):
    """A machine with everything; tests take parts away. box.install(package, version or None)."""
    cuda = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_capability=lambda index: (9, 0),
        mem_get_info=lambda index: (140_000_000_000, 150_000_000_000),
    )
    torch = SimpleNamespace(
        __version__="2.11.0+cu130", version=SimpleNamespace(cuda="13.0"), cuda=cuda
    )
    versions = dict(VERSIONS)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    made: list[tuple[object, ...]] = []
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(diagnosis, "_torch", lambda: torch)
    monkeypatch.setattr(diagnosis, "package_version", versions.get)
    monkeypatch.setattr(hardware, "gpus", lambda: [H200])
    monkeypatch.setattr(hardware, "nvml_problem", lambda: None)
    monkeypatch.setattr("fsbench.simple.native.isa", lambda: "avx512")
    monkeypatch.setattr("fsbench.timers.make_timer", lambda *a, **k: made.append((a, k)))
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(
        torch=torch,
        cuda=cuda,
        nvcc=nvcc,
        made=made,
        patch=monkeypatch.setattr,
        install=lambda package, version: versions.__setitem__(package, version),
        no_gpu=lambda: monkeypatch.setattr(hardware, "gpus", list),
    )


def test_a_complete_machine_has_nothing_to_fix(box):
    checks = diagnosis.diagnose()
    assert {check.status for check in checks} == {"ok"}
    assert not any(check.fix for check in checks)
    assert box.made  # CUPTI was tried, not only looked up


def refuse(error):
    def refusing(*arguments, **keywords):
        raise error

    return refusing


def absent(package, *others):
    """Packages that are not installed."""
    return lambda box: [box.install(name, None) for name in (package, *others)]


def of_torch(**parts):
    return lambda box: vars(box.cuda).update(parts)


def no_driver(box):
    box.patch(hardware, "nvml_problem", lambda: "NVML: Driver Not Loaded")


GPU = "pip install -e '.[gpu]'"
NO_PERMISSION = TimerUnavailable("timer cupti: no permission")
NOT_BUILT = ProviderUnavailable("fsbench.simple: not built")
DENIED = PermissionError(13, "Permission denied")
CASES = [  # what is the case, check, status, part of the detail, part of the fix
    (absent("triton"), "triton", "missing", "", "pip install 'triton>=3.6'"),
    (absent("flashinfer-python"), "flashinfer", "missing", "", GPU),
    (absent("cupti-python"), "cupti", "missing", "", GPU),
    (lambda box: box.install("triton", "3.10.0"), "triton", "ok", "", ""),
    (lambda box: box.install("triton", "3.5.1"), "triton", "missing", "", "triton>=3.6"),
    (lambda box: box.install("flashinfer-python", "0.6.8"), "flashinfer", "missing", "0.6.9", GPU),
    (lambda box: box.install("flashinfer-python", "0.6.14.post1"), "flashinfer", "ok", "", ""),
    (
        lambda box: box.patch("fsbench.timers.make_timer", refuse(NO_PERMISSION)),
        *("cupti", "missing", "timer cupti: no permission", "--timer events"),
    ),
    (of_torch(is_available=lambda: False), "torch", "missing", "", "driver"),
    (
        of_torch(get_device_capability=lambda index: (7, 5)),
        *("compute_capability", "missing", "7.5", ""),
    ),
    (
        of_torch(mem_get_info=lambda index: (1_500_000_000, 150_000_000_000)),
        *("gpu_memory", "warning", "0: 1.5 GB free", ""),
    ),
    (
        lambda box: box.patch("fsbench.simple.native.isa", refuse(NOT_BUILT)),
        *("cpu_samplers", "missing", "fsbench.simple: not built", "C++ compiler"),
    ),
    (lambda box: box.nvcc.unlink(), "nvcc", "missing", "", "flashinfer-jit-cache"),
    (
        lambda box: (box.nvcc.unlink(), box.install("flashinfer-jit-cache", "0.6.9")),
        *("nvcc", "ok", "", ""),
    ),
    (
        lambda box: box.patch("tempfile.TemporaryFile", refuse(DENIED)),
        *("output", "warning", "Permission denied", "--out"),
    ),
    (lambda box: box.no_gpu(), "gpu", "warning", "CPUs", ""),
    (no_driver, "nvml", "warning", "NVML: Driver Not Loaded", ""),
    (
        lambda box: (no_driver(box), box.install("nvidia-ml-py", None)),
        *("nvml", "missing", "", "pip install nvidia-ml-py"),
    ),
]


@pytest.mark.parametrize(("change", "check", "status", "detail", "fix"), CASES)
def test_what_is_wrong_is_found_with_its_fix(box, change, check, status, detail, fix):
    change(box)
    result = getattr(diagnosis, f"check_{check}")()
    assert result.status == status
    assert detail in result.detail and fix in result.fix


@pytest.mark.parametrize("check", ["triton", "flashinfer", "cupti"])
def test_without_a_gpu_its_packages_are_a_warning(box, check):
    absent("triton", "flashinfer-python", "cupti-python")(box)
    box.no_gpu()
    result = getattr(diagnosis, f"check_{check}")()
    assert result.status == "warning" and "without an NVIDIA GPU" in result.detail


def test_torch_that_does_not_see_the_gpu(box, monkeypatch):
    box.cuda.is_available = lambda: False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnosis.check_torch().fix == "unset CUDA_VISIBLE_DEVICES"
    box.torch.version.cuda = None
    assert "pip install" in diagnosis.check_torch().fix
    box.no_gpu()
    assert diagnosis.check_torch().status == "ok"


def test_the_command_prints_one_line_per_check_with_its_fix(box):
    box.install("flashinfer-python", None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines, _, commands = result.output.partition("\nYou can run now:\n")
    lines = lines.splitlines()
    assert len(lines) == len(diagnosis.CHECKS)
    assert "fsbench run --preset quick " in commands and "fsbench verify " in commands
    # Brackets are markup to rich; the command must come out as it is typed.
    assert [line for line in lines if line.startswith("missing")] == [
        "missing flashinfer  not installed  ->  pip install -e '.[gpu]'"
    ]


def test_the_command_prints_json(box):
    box.cuda.mem_get_info = lambda index: (1, 2)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    facts = json.loads(result.output)
    assert facts["can_run"] is True
    assert [each.split()[1] for each in facts["commands"]] == ["run", "verify", "list"]
    assert [DoctorCheck(**check) for check in facts["checks"]] == diagnosis.diagnose()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_machine_that_can_run_nothing_is_code_4(box, monkeypatch, options):
    monkeypatch.setattr(diagnosis, "_torch", lambda: None)
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 4
    assert "pip install 'torch>=2.11'" in result.output
    assert "fsbench run" not in result.output


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda box: None, "fsbench run --preset quick"),
        (of_torch(is_available=lambda: False), "fsbench run --preset smoke"),
        (absent("triton"), "fsbench run --preset smoke"),
        (lambda box: box.install("vllm", "0.26.0"), "fsbench e2e --engine vllm"),
        (lambda box: box.install("transformers", "5.0"), "fsbench e2e"),
    ],
)
def test_the_last_lines_are_what_can_run_now(box, change, expected):
    change(box)
    assert expected in [command for command, _ in diagnosis.runnable(diagnosis.diagnose())]


def test_this_machine():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "ok      torch" in result.output

"""`fsbench doctor` and its checks, on machines made up by monkeypatching."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fsbench.cli import app, diagnosis
from fsbench.cli.diagnosis import Check
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
        install=lambda package, version: versions.__setitem__(package, version),
        no_gpu=lambda: monkeypatch.setattr(hardware, "gpus", list),
    )


def test_a_complete_machine_has_nothing_to_fix(box):
    checks = diagnosis.diagnose()
    assert {check.status for check in checks} == {"ok"}
    assert not any(check.fix for check in checks)
    assert box.made  # CUPTI was tried, not only looked up


def test_every_check_is_run():
    functions = {value for name, value in vars(diagnosis).items() if name.startswith("check_")}
    assert functions == set(diagnosis.CHECKS)


@pytest.mark.parametrize(
    ("package", "check", "command"),
    [
        ("triton", diagnosis.check_triton, "pip install 'triton>=3.6'"),
        ("flashinfer-python", diagnosis.check_flashinfer, "pip install -e '.[gpu]'"),
        ("cupti-python", diagnosis.check_cupti, "pip install -e '.[gpu]'"),
    ],
)
def test_a_missing_package(box, package, check, command):
    box.install(package, None)
    assert (check().status, check().fix) == ("missing", command)
    box.no_gpu()
    assert check().status == "warning"
    assert "without an NVIDIA GPU" in check().detail


def test_an_old_triton(box):
    box.install("triton", "3.10.0")
    assert diagnosis.check_triton().status == "ok"
    box.install("triton", "3.5.1")
    assert diagnosis.check_triton().status == "missing"


def test_cupti_that_does_not_start(box, monkeypatch):
    def refuse(*arguments, **keywords):
        raise TimerUnavailable("timer cupti: no permission")

    monkeypatch.setattr("fsbench.timers.make_timer", refuse)
    found = diagnosis.check_cupti()
    assert (found.status, found.detail) == ("missing", "timer cupti: no permission")
    assert "--timer events" in found.fix


def test_torch_that_does_not_see_the_gpu(box, monkeypatch):
    box.cuda.is_available = lambda: False
    assert "driver" in diagnosis.check_torch().fix
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert diagnosis.check_torch().fix == "unset CUDA_VISIBLE_DEVICES"
    box.torch.version.cuda = None
    assert "pip install" in diagnosis.check_torch().fix
    assert diagnosis.check_torch().status == "missing"
    box.no_gpu()
    assert diagnosis.check_torch().status == "ok"


def test_no_gpu_and_no_driver(box, monkeypatch):
    box.no_gpu()
    monkeypatch.setattr(hardware, "nvml_problem", lambda: "NVML: Driver Not Loaded")
    assert diagnosis.check_gpu().status == "warning"
    assert "CPUs" in diagnosis.check_gpu().detail
    nvml = diagnosis.check_nvml()
    assert (nvml.status, nvml.detail) == ("warning", "NVML: Driver Not Loaded")
    box.install("nvidia-ml-py", None)
    assert diagnosis.check_nvml().fix == "pip install nvidia-ml-py"


def test_an_old_gpu(box):
    box.cuda.get_device_capability = lambda index: (7, 5)
    found = diagnosis.check_compute_capability()
    assert found.status == "missing" and "7.5" in found.detail


def test_a_busy_gpu(box):
    box.cuda.mem_get_info = lambda index: (1_500_000_000, 150_000_000_000)
    found = diagnosis.check_gpu_memory()
    assert (found.status, found.detail) == ("warning", "0: 1.5 GB free")


def test_no_core_of_the_cpu_samplers(box, monkeypatch):
    def missing():
        raise ProviderUnavailable("fsbench.simple: not built")

    monkeypatch.setattr("fsbench.simple.native.isa", missing)
    check = diagnosis.check_cpu_samplers()
    assert (check.status, check.detail) == ("missing", "fsbench.simple: not built")
    assert "C++ compiler" in check.fix


def test_no_cuda_compiler(box):
    box.nvcc.unlink()
    assert diagnosis.check_nvcc().status == "missing"
    assert "flashinfer-jit-cache" in diagnosis.check_nvcc().fix
    box.install("flashinfer-jit-cache", "0.6.9")
    assert diagnosis.check_nvcc().status == "ok"


def test_a_folder_that_cannot_be_written(box, monkeypatch):
    def refuse(**keywords):
        raise PermissionError(13, "Permission denied")

    assert diagnosis.check_output().status == "ok"
    monkeypatch.setattr(diagnosis.tempfile, "TemporaryFile", refuse)
    found = diagnosis.check_output()
    assert found.status == "warning" and "Permission denied" in found.detail
    assert "--out" in found.fix


def test_the_command_prints_one_line_per_check_with_its_fix(box):
    box.install("flashinfer-python", None)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == len(diagnosis.CHECKS)
    # Brackets are markup to rich; the command must come out as it is typed.
    assert [line for line in lines if line.startswith("missing")] == [
        "missing flashinfer  not installed  ->  pip install -e '.[gpu]'"
    ]


def test_the_command_prints_json(box):
    box.cuda.mem_get_info = lambda index: (1, 2)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.output)
    assert found["can_run"] is True
    assert [Check(**check) for check in found["checks"]] == diagnosis.diagnose()


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_machine_that_can_run_nothing_is_code_4(box, monkeypatch, options):
    monkeypatch.setattr(diagnosis, "_torch", lambda: None)
    result = CliRunner().invoke(app, ["doctor", *options])
    assert result.exit_code == 4
    assert "pip install 'torch>=2.11'" in result.output


def test_this_machine():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "ok      torch" in result.output

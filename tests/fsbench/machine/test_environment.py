"""The environment record."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta

import numpy
import pytest
import torch

import fsbench
from fsbench.errors import InvalidArgument, ResultsError
from fsbench.machine import environment as module
from fsbench.machine import hardware
from fsbench.machine.environment import environment, git_state
from fsbench.records.store import Store

NOTHING_KNOWN = (None, None)


def test_the_record_of_a_cpu_run():
    record = environment("cpu", ["/home/me/.venv/bin/fsbench", "run"])
    assert json.loads(json.dumps(record)) == record
    assert (record["device"], record["gpu"]) == ("cpu", "")
    assert record["cpu"] == hardware.cpu_name() != ""
    assert record["argv"] == ["fsbench", "run"]
    assert record["fsbench"] == fsbench.__version__
    assert (record["torch"], record["numpy"]) == (torch.__version__, numpy.__version__)
    age = datetime.now(UTC) - datetime.fromisoformat(record["utc"])
    assert timedelta(0) <= age < timedelta(minutes=1)


def test_a_tree_that_travelled_is_named_by_the_variable(monkeypatch):
    monkeypatch.setenv("FSBENCH_COMMIT", "abc123")
    record = environment("cpu", [])
    assert (record["git_sha"], record["git_dirty"]) == ("abc123", None)


def test_the_device_is_its_type_so_that_any_gpu_of_the_kind_may_resume(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    record = environment("cuda:1", [])
    assert (record["device"], record["gpu"]) == ("cuda", "NVIDIA H200")
    Store.create(tmp_path, record).close()
    Store.resume(tmp_path, environment("cuda:0", ["resumed"])).close()
    with pytest.raises(ResultsError, match="expected gpu ''; got 'NVIDIA H200'"):
        Store.resume(tmp_path, environment("cpu", []))


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path):
    """A source tree with one commit."""
    for folder in ("fsbench", "kernels", "results"):
        (tmp_path / folder).mkdir()
    (tmp_path / "fsbench" / "runner.py").write_text("one\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "start")
    return tmp_path


def test_no_source_tree_no_commit(tree, tmp_path_factory):
    installed = tree / "venv" / "site-packages"  # of somebody else's repository
    installed.mkdir(parents=True)
    assert git_state(installed) == NOTHING_KNOWN
    assert git_state(tmp_path_factory.mktemp("plain")) == NOTHING_KNOWN


def test_git_state_of_a_tree(tree):
    """Results do not make it dirty; changed code and new samplers do."""
    assert git_state(tree) == (git(tree, "rev-parse", "HEAD"), False)
    (tree / "results" / "points.jsonl").write_text("{}\n")
    assert git_state(tree)[1] is False
    (tree / "kernels" / "new_sampler.py").write_text("two\n")
    assert git_state(tree)[1] is True
    (tree / "kernels" / "new_sampler.py").unlink()
    (tree / "fsbench" / "runner.py").write_text("two\n")
    assert git_state(tree)[1] is True


def test_git_is_not_needed(tree, monkeypatch):
    def hang(*arguments, **keywords):
        raise subprocess.TimeoutExpired("git", keywords["timeout"])

    with monkeypatch.context() as patched:
        patched.setattr(module.subprocess, "run", hang)
        assert git_state(tree) == NOTHING_KNOWN
    monkeypatch.setenv("PATH", "")
    assert git_state(tree) == NOTHING_KNOWN
    assert environment("cpu", [])["git_sha"] is None


def test_versions_are_those_of_the_distributions(monkeypatch):
    assert module.package_version("fsbench-no-such-package") is None
    monkeypatch.setattr(module, "package_version", lambda package: f"version of {package}")
    record = environment("cpu", [])
    assert record["flashinfer"] == "version of flashinfer-python"
    assert record["cupti"] == "version of cupti-python"


@pytest.mark.parametrize("commit", ["../../etc", "a/b", "-rf", "x" * 65, "two words", "é"])
def test_a_commit_that_is_no_name_of_a_folder_is_refused(monkeypatch, commit):
    monkeypatch.setenv("FSBENCH_COMMIT", commit)
    with pytest.raises(InvalidArgument, match=r"FSBENCH_COMMIT: expected .*; got"):
        environment("cpu", [])
    monkeypatch.setenv("FSBENCH_COMMIT", "")  # as if it were not set
    assert environment("cpu", [])["git_sha"] != ""

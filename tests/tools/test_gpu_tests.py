"""tools/gpu_tests.py counts what pytest did, and fails if anything failed or never ran."""

from __future__ import annotations

import gpu_tests
import pytest

TESTS = """
import pytest

def test_passes(): pass

def test_fails(): assert False

@pytest.mark.skip
def test_skipped(): pass
"""


@pytest.fixture
def one_file(tmp_path, monkeypatch):
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)


def test_the_last_line_counts_all_parts(one_file, monkeypatch, capsys):
    monkeypatch.setattr(gpu_tests, "PARTS", {"a": ["."], "b": [".", "-k", "passes"]})
    monkeypatch.setattr("sys.argv", ["gpu_tests.py"])
    assert gpu_tests.main() == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 passed, 1 failed, 1 skipped in ")


def test_a_part_that_pytest_cannot_run_is_no_success(one_file, monkeypatch, capsys):
    monkeypatch.setattr(gpu_tests, "PARTS", {"a": ["nowhere"]})
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "a"])
    assert gpu_tests.main() == 1
    assert "stopped early in 1 parts" in capsys.readouterr().out


def test_an_unknown_part_is_named(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "kernel"])
    with pytest.raises(SystemExit):
        gpu_tests.main()
    assert "expected kernels, samplers, alone; got kernel" in capsys.readouterr().err

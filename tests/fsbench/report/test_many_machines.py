"""Results of several machines in one folder, as `report`, `compare` and `recommend` read them."""

from __future__ import annotations

from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.problem import Problem
from fsbench.records.cell import Cell, Conditions, Round
from fsbench.records.store import Store


def fsbench(*arguments):
    done = CliRunner().invoke(app, [str(each) for each in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_results_of_many_gpus_and_hosts_are_read_together(tmp_path):
    problem = Problem(8, 4096, 151936)
    for gpu, host, us in (("H100", "a", 300.0), ("H200", "b", 200.0), ("H200", "c", 210.0)):
        name = f"NVIDIA {gpu}"
        conditions = Conditions(name, "cupti", True, "cold")
        store = Store.create(tmp_path / gpu / f"paper-{host}", {"gpu": name, "cpu": host})
        for provider, times in (("flash_sampling", 1.0), ("gumbel_argmax", 1.5)):
            cell = Cell(provider, provider, "exact", times == 1, conditions, problem)
            store.append_round(cell, 0, Round([us * times] * 20))
        store.close()
    fsbench("report", tmp_path, "--out", tmp_path / "report")
    pages = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("report/*")}
    assert set(pages) == {"index", "h100", "h200"} and "paper-a" in pages["h100"]
    assert "paper-b" in pages["h200"] and "paper-c" in pages["h200"]
    shown = fsbench("compare", tmp_path / "H200" / "paper-b", tmp_path / "H200" / "paper-c")
    assert "cpu: b in A, c in B" in shown and "1.050" in shown
    for gpu, us in (("h100", "300.0"), ("h200", "210.0")):  # of two hosts the later folder
        advice = fsbench("recommend", "--model", "qwen3-8b", "--gpu", gpu, "--batch", "8",
                         "--results", tmp_path)  # fmt: skip
        assert us in advice

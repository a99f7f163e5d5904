"""examples/fleet/ with doubles of sbatch, sky, rsync and fsbench, and what reads such results."""

from __future__ import annotations

import os
import subprocess

import pytest
from tree import ROOT
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.problem import Problem
from fsbench.records.cell import Cell, Conditions, Round
from fsbench.records.store import Store

FLEET = ROOT / "examples" / "fleet"

DOUBLES = {
    # fsbench run OPTIONS --out FOLDER; --resume FOLDER; report FOLDER
    "fsbench": """echo "fsbench $*" >> "$CALLS"
[ "$1" = run ] || exit 0
folder=${@: -1}
mkdir -p "$folder" && touch "$folder/env.json"
[[ $folder != *bad* ]]""",
    # Runs the tasks of the array here and now.
    "sbatch": """id=$(grep -c sbatch "$CALLS")
echo "sbatch $*" >> "$CALLS"
for option in "$@"; do
    case $option in
        --array=1-*) last=${option#*-*-*-} ;;
        --wrap=*) script=${option#*=} ;;
    esac
done
for task in $(seq "${last:-1}"); do SLURM_ARRAY_TASK_ID=$task bash -c "$script" > /dev/null; done
echo "$id" """,
    # Runs the task of the YAML file, the last word, in a separate home.
    "sky": """echo "sky $*" >> "$CALLS"
[ "$1" = launch ] || exit 0
while [ $# -gt 1 ]; do
    [ "$1" = --cluster ] && export HOME=$PWD/$2
    [ "$1" = --env ] && export "$2"
    shift
done
bash -c "$(sed -n 's/^run: //p' "$1")" """,
    "rsync": 'mkdir -p "$3" && cp -r "$PWD/${2/:fleet/\\/fleet}." "$3"',
    "git": "echo 1234567",
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a script of the examples with runs `good` and `bad`; (exit code, calls of fsbench)."""
    (tmp_path / "bin").mkdir()
    for name, text in DOUBLES.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").write_text("bad --preset lean\ngood --preset paper --breakdown\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def start(script, *arguments):
        (tmp_path / "calls").write_text("")
        done = subprocess.run([FLEET / script, *arguments], cwd=tmp_path)
        calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/", "").splitlines()
        return done.returncode, calls

    return start


def test_a_machine_measures_every_run_and_continues_what_it_has(start):
    host = os.uname().nodename
    assert start("measure.sh", "all", "h100") == (
        1,
        [
            f"fsbench run --preset lean --out all/h100/bad-{host}",
            f"fsbench run --preset paper --breakdown --out all/h100/good-{host}",
        ],
    )
    assert start("measure.sh", "all", "h100", "2") == (
        0,
        [f"fsbench run --resume all/h100/good-{host}"],
    )


def test_a_folder_with_spaces_and_a_last_line_without_an_end(start, tmp_path):
    (tmp_path / "runs").write_text("good --preset paper")
    code, calls = start("measure.sh", "all of them", "h100")
    folder = f"all of them/h100/good-{os.uname().nodename}"
    assert (code, calls) == (0, [f"fsbench run --preset paper --out {folder}"])
    assert (tmp_path / folder / "env.json").is_file()


@pytest.mark.parametrize(
    "script, types", [("slurm.sh", ("h100", "h200")), ("sky.sh", ("H100", "H200"))]
)
def test_every_gpu_type_is_measured_and_all_folders_come_together(start, tmp_path, script, types):
    code, calls = start(script, "all", *types)
    assert code == 0
    folders = {f"{path.parts[-3]}/{path.parts[-2]}" for path in tmp_path.glob("all/*/*/env.json")}
    host = os.uname().nodename
    assert folders == {f"{gpu}/{run}-{host}" for gpu in types for run in ("good", "bad")}
    assert calls[-1] == "fsbench report all --out all/report"
    assert sum(call.startswith("fsbench run") for call in calls) == 4
    if script == "slurm.sh":
        after = [call for call in calls if "--dependency" in call]
        assert len(after) == 1 and "--dependency=afterany:0:1 " in after[0]
    else:
        down = {call.split()[-1] for call in calls if call.startswith("sky down")}
        assert down == {"fsbench-h100", "fsbench-h200"}


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

"""Kernels that are compiled before an engine serves: which, by whom, and what happens if not."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_vllm_states import D, V
from tiers import full
from vllm_play import Play, Recording, grammars, request

from fsbench.integrations import vllm_runner
from fsbench.integrations.compile_ahead import (
    CompileAhead,
    EngineSpec,
    engine_calls,
    ensure_cache,
    unusable,
)
from fsbench.integrations.draw_kinds import DrawKind, served_kinds
from fsbench.integrations.routing import SHARDED_HEAD_NEEDS, WHOLE_HEAD_NEEDS
from fsbench.integrations.vllm_0_26 import engine_spec
from fsbench.kernels.warming.offline import CHIPS

SPEC = EngineSpec("flash_sample", V, 704, D, "bf16", None, max_rows=16)
SMALL = SPEC._replace(V=512, rows=512, D=64, max_rows=1)
ALL_KINDS = SPEC.draw_kinds()
NOT_COMPILED = "kernels are being compiled"


DOUBLE = """
import os, sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
pipe.recv()
"""


def compile_double(script: str, spec: EngineSpec = SPEC) -> CompileAhead:
    """Return processes that run a script in place of the compiler."""
    return CompileAhead(spec, CHIPS["h200"], [sys.executable, "-c", DOUBLE + script])


def report(last: int) -> str:
    """Return a script that reports the first kinds as compiled."""
    return f"any(map(pipe.send, range({last})))"


@pytest.fixture
def plugged(load):
    """Return a function that loads a runner whose plug-in waits for these processes."""

    def loaded(ahead: CompileAhead) -> Any:
        runner = load()
        runner._fsbench = vllm_runner.RunnerPlugin(runner, "flash_sample", ahead)
        return runner

    return loaded


def warm_up(runner: Any, rows: int) -> None:
    runner._fsbench.warm_up(runner, torch.zeros(rows, D, dtype=torch.bfloat16))


def unserved(runner: Any) -> dict[str, int]:
    return runner._fsbench.sampling.counts.as_dict()["left"]


MIXED = (
    *("plain", "greedy", "default", "frequency", "repetition", "grammar", "top logprobs"),
    *("tempered logprobs", "default logprobs", "biased logprobs", "penalized logprobs"),
    *("grammar logprobs", "many logprobs"),
)
"""Kinds of requests that cover all needs."""


@pytest.mark.parametrize(
    ("name", "mode"),
    [("flash_sample", "raw_logprobs"), ("screened", "processed_logprobs")],
)
def test_routing_makes_no_other_kinds_of_draws(load, name, mode):
    runner = load(name)
    runner.sampler.logprobs_mode = mode
    sampling = runner._fsbench.sampling
    served = served_kinds(sampling.draw.supported, mode == "raw_logprobs", name == "screened")
    sampling.draw = recording = Recording(sampling.draw, real=False)
    if name == "screened":
        recording.screens = lambda B, largest_k: largest_k <= 20
    for pair in combinations(MIXED, 2):
        play = Play(runner)
        for kind in pair:
            play.add(kind, request(kind), [5, 6])
        play.step(allowed=grammars(pair))
    drawn = {DrawKind.from_rows(rows) for rows in recording.rows}
    assert drawn <= set(served) and len(drawn) > 15


def test_common_kinds_are_compiled_first():
    served = served_kinds(WHOLE_HEAD_NEEDS, True, True)
    common = [DrawKind(), DrawKind(filters=True), DrawKind(filters=True, screened=True)]
    assert served[:3] == common == [kind for kind in served if kind.is_common]
    assert not any(kind.filters for kind in served_kinds(SHARDED_HEAD_NEEDS, True, False))


def test_the_spec_is_known_before_the_model_is_loaded(load):
    runner = load()
    expected = engine_spec(runner, "flash_sample")
    head = runner._fsbench._head.head
    assert expected == EngineSpec.of_head("flash_sample", head, runner.max_num_reqs, True)
    assert engine_spec(runner, "another") is None


def test_the_engine_loads_what_was_compiled(plugged, caplog):
    """Of every kind, at every size that has its kernels, the largest first."""
    runner = plugged(compile_double(report(len(ALL_KINDS))))
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw, real=False)
    with caplog.at_level(logging.INFO, "vllm.fsbench"):
        warm_up(runner, 17)
    assert [len(rows.hidden) for rows in recording.rows] == [17, 9, 5, 3, 2, 1] * len(ALL_KINDS)
    assert {DrawKind.from_rows(rows) for rows in recording.rows} == set(ALL_KINDS)
    assert not caplog.text and sampling.draw is recording  # a CPU has no graphs


def test_kernels_are_loaded_from_the_folder_that_the_processes_fill(plugged, monkeypatch, tmp_path):
    """Also those that are compiled late: torch.compile has changed the engine's folder by then."""
    monkeypatch.setattr(vllm_runner, "WAIT_S", 0.0)
    filled, inductor = str(tmp_path / "filled"), str(tmp_path / "inductor")
    monkeypatch.setenv("TRITON_CACHE_DIR", filled)
    done = tmp_path / "done"
    wait = f"while not os.path.exists({str(done)!r}): time.sleep(0.01)"
    ahead = compile_double(f"{report(3)}\n{wait}\n{report(len(ALL_KINDS))}\ntime.sleep(60)")
    runner = plugged(ahead)
    monkeypatch.setenv("TRITON_CACHE_DIR", inductor)
    sampling, folders = runner._fsbench.sampling, []

    def noting(rows: Any) -> Any:
        folders.append(triton.knobs.cache.dir)
        return draw(rows)

    draw, noting.supported = sampling.draw, sampling.draw.supported  # type: ignore[attr-defined]
    sampling.draw = runner._fsbench._draws[0] = noting
    ahead.wait(ALL_KINDS[:3])
    warm_up(runner, 1)
    assert folders and set(folders) == {filled}
    done.touch()
    assert ahead.wait(ALL_KINDS, 20)
    folders.clear()
    assert runner._fsbench.is_ready(ALL_KINDS[-1])
    assert set(folders) == {filled}
    assert triton.knobs.cache.dir == inductor
    runner.shutdown()


def test_if_the_processes_die_the_engine_compiles(plugged, caplog):
    runner = plugged(compile_double(f"{report(2)}; os.kill(os.getpid(), 9)"))
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw, real=False)
    warm_up(runner, 1)
    (record,) = caplog.records
    assert "compiling ahead has ended (exit code -9)" in record.getMessage()
    assert {DrawKind.from_rows(rows) for rows in recording.rows} == set(ALL_KINDS)
    play = Play(runner)
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    assert unserved(runner) == {}


def test_vllm_samples_a_kind_until_it_is_compiled(plugged, monkeypatch, tmp_path):
    monkeypatch.setattr(vllm_runner, "WAIT_S", 0.0)
    done = tmp_path / "done"
    wait = f"while not os.path.exists({str(done)!r}): time.sleep(0.01)"
    script = f"{report(3)}\n{wait}\n{report(len(ALL_KINDS))}\ntime.sleep(60)"
    ahead = compile_double(script)
    runner = plugged(ahead)
    ahead.wait(ALL_KINDS[:3])
    warm_up(runner, 2)
    reported: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", reported.append)
    draw, hooks = runner._fsbench.sampling.draw, []

    def noting(rows: Any) -> Any:
        hooks.append(triton.knobs.runtime.jit_post_compile_hook)
        return draw(rows)

    play = Play(runner)
    play.add("plain", request("plain"), [5, 6])
    play.step()
    assert unserved(runner) == {}
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    assert unserved(runner) == {NOT_COMPILED: 2}  # the batch is drawn together
    done.touch()
    assert ahead.wait(ALL_KINDS, 20)
    runner._fsbench._draws[0], noting.supported = noting, draw.supported  # type: ignore[attr-defined]
    play.step()
    assert unserved(runner) == {NOT_COMPILED: 2}
    assert hooks == [None, None]  # loading two sizes is not reported as compiling
    assert triton.knobs.runtime.jit_post_compile_hook == reported.append
    runner.shutdown()
    assert not ahead.is_running or ahead.wait(ALL_KINDS, 5)


def test_processes_that_fail_while_the_engine_serves_are_logged_once(plugged, monkeypatch, caplog):
    monkeypatch.setattr(vllm_runner, "WAIT_S", 0.0)
    script = f"{report(3)}\ntime.sleep(1)\npipe.send('no space left')"
    ahead = compile_double(script)
    runner = plugged(ahead)
    ahead.wait(ALL_KINDS[:3])
    warm_up(runner, 1)
    ahead.wait(ALL_KINDS, 20)
    play = Play(runner)
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    play.step()
    assert unserved(runner) == {NOT_COMPILED: 2}
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "compiling has ended (no space left)" in line] == lines[-1:]


def test_another_head_than_expected_is_compiled_for(plugged, monkeypatch):
    started: list[EngineSpec] = []
    monkeypatch.setattr(vllm_runner, "start_compiling", started.append)
    ahead = compile_double("time.sleep(60)", SPEC._replace(V=V + 1))
    plugged(ahead)
    assert [spec.V for spec in started] == [V]
    assert ahead.wait([], 5) and not ahead.is_ready(DrawKind())


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "cache"
    assert unusable(folder)
    assert unusable(tmp_path / "new") == ""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    ensure_cache()
    used = Path(os.environ["TRITON_CACHE_DIR"])
    assert used.is_dir() and Path(triton.knobs.cache.dir) == used
    (record,) = caplog.records
    assert str(folder) in record.getMessage() and str(used) in record.getMessage()
    ensure_cache()
    assert len(caplog.records) == 1


def test_a_full_disk_is_noticed_before_anything_is_compiled(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=5 << 20))
    assert unusable(tmp_path) == "5 MiB free, 256 MiB expected"


ENGINE = """
import json, sys
from fsbench.integrations.compile_ahead import CompileAhead, EngineSpec
from fsbench.kernels.warming.offline import CHIPS
ahead = CompileAhead(EngineSpec(*json.loads(sys.argv[1])), CHIPS["h200"])
print(ahead._process.pid, flush=True)
ahead.wait(ahead.spec.draw_kinds()[:int(sys.argv[2])])
print(ahead.failure or "compiled", flush=True)
"""


def engine(cache: Path, num_kinds: int, **options: Any) -> subprocess.Popen[str]:
    """Start an engine that waits for kernels; it prints the compiling group's id, then the end."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", ENGINE, json.dumps(SMALL), str(num_kinds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def is_alive(group: int) -> bool:
    """Return whether a process of the group is alive."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                return True
    return False


def group_ends(group: int) -> bool:
    until = time.monotonic() + 30
    while is_alive(group) and time.monotonic() < until:
        time.sleep(0.2)
    return not is_alive(group)


def test_processes_end_with_an_engine_that_is_killed(tmp_path):
    killed = engine(tmp_path, 40)
    group = int(killed.stdout.readline())
    assert is_alive(group)
    time.sleep(1)  # it compiles by then
    killed.kill()
    assert group_ends(group)


@pytest.mark.full
def test_engines_share_a_cache_also_with_one_that_was_killed(tmp_path):
    """One is killed while it compiles; then two start at once, and a last one."""
    killed = engine(tmp_path, 40)
    group = int(killed.stdout.readline())
    while not list(tmp_path.rglob("*")):
        time.sleep(0.1)
    killed.kill()
    both = [engine(tmp_path, 1), engine(tmp_path, 1)]
    assert [each.communicate()[0].split()[1:] for each in both] == [["compiled"]] * 2
    assert group_ends(group)
    files = set(tmp_path.rglob("*.cubin"))
    assert engine(tmp_path, 1).communicate()[0].split()[1:] == ["compiled"]
    assert files and files <= set(tmp_path.rglob("*.cubin"))


@pytest.mark.full
def test_a_disk_that_fills_up_while_compiling_is_named(tmp_path):
    def no_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = engine(tmp_path, 40, preexec_fn=no_files)
    message = done.communicate()[0]
    assert "File too large" in message or "No usable temporary directory" in message


UNCOVERED = """
import json, sys
from fsbench.integrations import draw_kinds
from fsbench.integrations.compile_ahead import EngineSpec, engine_calls
from fsbench.kernels.warming import offline
spec, chip = EngineSpec(*json.loads(sys.argv[1])), offline.CHIPS[sys.argv[2]]
offline.use_cpu_guard()
covering = draw_kinds.SIZES
# Tile shapes change at multiples of 16 up to 256, and of 64 above.
batches = range(1, spec.max_rows + 1)
every = [B for B in batches if B <= 16 or B % (16 if B <= 257 else 64) in (0, 1)]
uncovered = {}
for index in json.loads(sys.argv[3]):
    kernels = []
    for draw_kinds.SIZES in (covering, every):
        call = engine_calls(spec)[index]  # fake tensors of one mode only
        with offline.without_gpu(chip) as launches:
            call()
            kernels.append({(each.kernel.__name__, each.key) for each in launches})
    if kernels[1] - kernels[0]:
        uncovered[str(call)] = sorted(name for name, _ in kernels[1] - kernels[0])
print(json.dumps(uncovered))
"""


def indices_of_options(draw_kinds: Sequence[DrawKind]) -> list[int]:
    """Return indices of common kinds, and of a few that have every value of every option."""
    values = [set(kind._asdict().items()) for kind in draw_kinds]
    chosen = [index for index, kind in enumerate(draw_kinds) if kind.is_common]
    missing = set[Any]().union(*values).difference(*(values[index] for index in chosen))
    while missing:
        best = max(range(len(draw_kinds)), key=lambda index: len(values[index] & missing))
        chosen.append(best)
        missing -= values[best]
    return chosen


@pytest.mark.parametrize(
    ("chip", "sampler", "D", "rows"),
    [
        ("h200", "flash_sample", 1024, 66),
        full("h100", "flash_sample", 4096, 1024),
        full("h200", "screened", 4096, 1024),
    ],
)
def test_sizes_cover_the_kernels_of_all_batch_sizes(chip, sampler, D, rows):
    """Tiles depend on the batch size and on single options, so a few kinds suffice."""
    spec = EngineSpec(sampler, 151936, 151936, D, "bf16", None, rows)
    indices = [1] if rows < 100 else indices_of_options(spec.draw_kinds())  # 1: filters
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", UNCOVERED, json.dumps(spec), chip, json.dumps(indices)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {}
    assert len(engine_calls(spec)) == len(spec.draw_kinds())

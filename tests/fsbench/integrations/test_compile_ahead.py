"""Kernels that are compiled before an engine serves: which, by whom, and what happens if not."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from fake_vllm_states import D, V
from vllm_play import GRAMMAR, KINDS, Play, Recording, request

from fsbench.integrations import vllm_runner
from fsbench.integrations.compile_ahead import (
    CompileAhead,
    EngineSpec,
    engine_calls,
    ensure_cache,
    parsed_request,
    request_text,
    unusable,
)
from fsbench.integrations.draw_kinds import SIZES, DrawKind, served_kinds
from fsbench.integrations.routing import SHARDED_HEAD_NEEDS, WHOLE_HEAD_NEEDS
from fsbench.integrations.vllm_0_26 import engine_spec
from fsbench.kernels.warming.offline import CHIPS

SPEC = EngineSpec("flash_sample", V, 704, D, "bf16", None, max_rows=16)
SMALL = SPEC._replace(V=512, rows=512, D=64, max_rows=1)


def double(script: str, spec: EngineSpec = SPEC) -> CompileAhead:
    """Processes that do what a script says in place of compiling."""
    return CompileAhead(spec, CHIPS["h200"], [sys.executable, "-c", script])


def numbers(last: int) -> str:
    return f"print(*range({last}), sep='\\n', flush=True)"


@pytest.fixture
def plugged(load):
    """A loaded runner whose plug-in waits for these processes."""

    def made(ahead: CompileAhead) -> Any:
        runner = load()
        runner._fsbench = vllm_runner.RunnerPlugin(runner, "flash_sample", ahead)
        return runner

    return made


def left(runner: Any) -> dict[str, int]:
    return runner._fsbench.sampling.counts.as_dict()["left"]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("name", ["flash_sample", "screened"])
def test_routing_makes_no_other_kinds_of_draws(load, name, mode):
    runner = load(name)
    runner.sampler.logprobs_mode = mode
    sampling = runner._fsbench.sampling
    kinds = set(served_kinds(sampling.draw.supported, mode == "raw_logprobs", name == "screened"))
    sampling.draw = recording = Recording(sampling.draw, real=False)
    if name == "screened":
        recording.screens = lambda B, largest_k: largest_k <= 20
    for pair in combinations(KINDS, 2):
        play = Play(runner)
        for each in pair:
            play.add(each, request(each), [5, 6])
        allowed = {each: GRAMMAR for each in pair if "grammar" in each}
        play.step(allowed=allowed)
    drawn = {DrawKind.from_rows(rows) for rows in recording.rows}
    assert drawn <= kinds
    assert len(drawn) > 15


def test_common_kinds_are_compiled_first():
    kinds = served_kinds(WHOLE_HEAD_NEEDS, True, True)
    assert kinds[:3] == [
        DrawKind(),
        DrawKind(filters=True),
        DrawKind(filters=True, screened=True),
    ]
    assert [kind for kind in kinds if kind.is_common] == kinds[:3]
    assert not [kind for kind in served_kinds(SHARDED_HEAD_NEEDS, True, False) if kind.filters]


def test_the_engine_is_known_before_its_model_is_loaded(load):
    runner = load()
    expected = engine_spec(runner, "flash_sample")
    head = runner._fsbench._head.head
    assert expected == EngineSpec.of_head("flash_sample", head, runner.max_num_reqs, True)
    runner.parallel_config.tensor_parallel_size = 2
    assert engine_spec(runner, "flash_sample") is None


def test_the_engine_loads_what_was_compiled(plugged, caplog):
    """At every size that has kernels of its own, the largest first, of every kind."""
    ahead = double(numbers(len(SPEC.kinds())))
    runner = plugged(ahead)
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw, real=False)
    with caplog.at_level(logging.INFO, "vllm.fsbench"):
        runner._fsbench.warm_up(runner, torch.zeros(17, D, dtype=torch.bfloat16))
    sizes = [17, 9, 5, 3, 2, 1]
    assert [len(rows.hidden) for rows in recording.rows] == sizes * len(SPEC.kinds())
    assert {DrawKind.from_rows(rows) for rows in recording.rows} == set(SPEC.kinds())
    assert not caplog.text and sampling.draw is recording  # there are no graphs on a CPU


def test_processes_that_die_make_the_engine_slower_and_no_worse(plugged, caplog):
    script = f"import os; {numbers(2)}; os.kill(os.getpid(), 9)"
    runner = plugged(double(script))
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw)
    runner._fsbench.warm_up(runner, torch.zeros(1, D, dtype=torch.bfloat16))
    (record,) = caplog.records
    assert "compiling ahead has ended (exit code -9)" in record.getMessage()
    assert {DrawKind.from_rows(rows) for rows in recording.rows} == set(SPEC.kinds())
    play = Play(runner)
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    assert left(runner) == {}


def test_what_is_not_compiled_is_left_to_vllm_until_it_is(plugged, monkeypatch, tmp_path):
    """A biased request; the processes end it while others are served."""
    monkeypatch.setattr(vllm_runner, "WAIT_S", 0.0)
    done = tmp_path / "done"
    rest = f"while not os.path.exists({str(done)!r}): time.sleep(0.01)"
    script = f"import os, time\n{numbers(3)}\n{rest}\n{numbers(len(SPEC.kinds()))}\ntime.sleep(60)"
    ahead = double(script)
    runner = plugged(ahead)
    ahead.wait(SPEC.kinds()[:3])
    runner._fsbench.warm_up(runner, torch.zeros(2, D, dtype=torch.bfloat16))
    hooked: list[Any] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hooked.append)
    sampling = runner._fsbench.sampling
    draw, during = sampling.draw, []

    def noting(rows: Any) -> Any:
        during.append(triton.knobs.runtime.jit_post_compile_hook)
        return draw(rows)

    play = Play(runner)
    play.add("plain", request("plain"), [5, 6])
    play.step()
    assert left(runner) == {}
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    assert left(runner) == {"kernels are being compiled": 2}  # the batch is drawn together
    done.touch()
    assert ahead.wait(SPEC.kinds(), 20)
    runner._fsbench._draws[0], noting.supported = noting, draw.supported  # type: ignore[attr-defined]
    play.step()
    assert left(runner) == {"kernels are being compiled": 2}
    assert during == [None, None]  # loading two sizes is not reported as compiling
    assert triton.knobs.runtime.jit_post_compile_hook == hooked.append
    runner.shutdown()
    assert not ahead.is_running or ahead.wait(SPEC.kinds(), 5)


def test_processes_that_fail_while_the_engine_serves_are_named_once(plugged, monkeypatch, caplog):
    monkeypatch.setattr(vllm_runner, "WAIT_S", 0.0)
    script = f"import sys, time\n{numbers(3)}\ntime.sleep(1)\nsys.exit('no\\nspace left')"
    ahead = double(script)
    runner = plugged(ahead)
    ahead.wait(SPEC.kinds()[:3])
    runner._fsbench.warm_up(runner, torch.zeros(1, D, dtype=torch.bfloat16))
    ahead.wait(SPEC.kinds(), 20)
    play = Play(runner)
    play.add("biased", request("logit_bias"), [5, 6])
    play.step()
    play.step()
    assert left(runner) == {"kernels are being compiled": 2}
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "compiling has ended (space left)" in line] == lines[-1:]


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
def test_processes_get_the_spec_and_the_chip_of_the_engine(chip):
    assert parsed_request(request_text(SPEC, chip, 7)) == (SPEC, chip, 7)


def test_another_head_than_expected_is_compiled_for(plugged, monkeypatch):
    started: list[EngineSpec] = []
    monkeypatch.setattr(vllm_runner, "start_compiling", started.append)
    ahead = double("import time; time.sleep(60)", SPEC._replace(V=V + 1))
    plugged(ahead)
    assert [each.V for each in started] == [V]
    assert ahead.wait([], 5) and not ahead.is_ready(DrawKind())


def test_a_cache_that_cannot_be_written_is_replaced(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    folder = tmp_path / "file" / "cache"
    assert unusable(folder)
    assert unusable(tmp_path / "new") == ""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    ensure_cache()
    moved = Path(os.environ["TRITON_CACHE_DIR"])
    assert moved.is_dir() and Path(triton.knobs.cache.dir) == moved
    (record,) = caplog.records
    assert str(folder) in record.getMessage() and str(moved) in record.getMessage()
    ensure_cache()
    assert len(caplog.records) == 1


def test_a_full_disk_is_seen_before_anything_is_compiled(monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=5 << 20))
    assert unusable(tmp_path) == "5 MiB free, 256 MiB expected"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        reason = unusable(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert reason == "File too large"


ENGINE = """
import json, sys, time
from fsbench.integrations.compile_ahead import CompileAhead, EngineSpec
from fsbench.kernels.warming.offline import CHIPS
ahead = CompileAhead(EngineSpec(*json.loads(sys.argv[1])), CHIPS["h200"])
print(ahead.pid, flush=True)
ahead.wait(ahead.spec.kinds()[:int(sys.argv[2])])
print(ahead.failure or "compiled", flush=True)
"""


def engine(cache: Path, num_kinds: int, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", ENGINE, json.dumps(SMALL), str(num_kinds)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **more)


def members(group: int) -> list[int]:
    """Processes of a group that are alive."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                os.getpgid(int(path.name)) == group
                and "Z" not in ((path / "stat").read_text().rpartition(")")[2].split()[0])
            ):
                found.append(int(path.name))
        except (OSError, IndexError):
            continue
    return found


def test_processes_end_with_an_engine_that_is_killed(tmp_path):
    killed = engine(tmp_path, 40)
    group = int(killed.stdout.readline())
    assert members(group)
    time.sleep(3)
    killed.kill()
    until = time.monotonic() + 30
    while members(group) and time.monotonic() < until:
        time.sleep(0.2)
    assert not members(group)


@pytest.mark.full
def test_engines_share_a_cache_also_with_one_that_was_killed(tmp_path):
    """One is killed while it compiles, two start at once, and the last finds everything there."""
    killed = engine(tmp_path, 40)
    group = int(killed.stdout.readline())
    time.sleep(15)
    killed.send_signal(signal.SIGKILL)
    both = [engine(tmp_path, 1), engine(tmp_path, 1)]
    assert [each.communicate()[0].split()[1:] for each in both] == [["compiled"]] * 2
    assert not members(group)
    files = set(tmp_path.rglob("*.cubin"))
    last = engine(tmp_path, 1)
    assert last.communicate()[0].split()[1:] == ["compiled"]
    assert files and files <= set(tmp_path.rglob("*.cubin"))


@pytest.mark.full
def test_a_disk_that_fills_up_while_compiling_is_named(tmp_path):
    def no_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    done = engine(tmp_path, 40, preexec_fn=no_files)
    message = done.communicate()[0]
    assert "File too large" in message or "No usable temporary directory" in message


COVERED = """
import json, sys, torch
from fsbench.integrations.compile_ahead import EngineSpec, engine_calls
from fsbench.integrations import draw_kinds
from fsbench.kernels.warming import offline
spec, chip = EngineSpec(*json.loads(sys.argv[1])), offline.CHIPS[sys.argv[2]]
offline.use_cpu_guard()
missed = {}
for index in range(min(int(sys.argv[3]), len(engine_calls(spec)))):
    found = []
    every = [B for B in range(1, spec.max_rows + 1) if B <= 40 or B % 16 in (0, 1)]
    for sizes in (draw_kinds.SIZES, every):
        draw_kinds.SIZES = sizes
        call = engine_calls(spec)[index]  # fake tensors of one mode only
        with offline.without_gpu(chip) as launches:
            call()
            found.append({(each.kernel.__name__, each.key) for each in launches})
        draw_kinds.SIZES = json.loads(sys.argv[4])
    if found[1] - found[0]:
        missed[str(call)] = sorted(name for name, _ in found[1] - found[0])
print(json.dumps(missed))
"""


@pytest.mark.parametrize(
    ("chip", "sampler", "D", "vocab", "rows", "calls"),
    [
        ("h200", "flash_sample", 1024, 151936, 66, 2),
        *(
            pytest.param(*case, 1024, 99, marks=pytest.mark.full)
            for case in (
                ("h100", "flash_sample", 4096, 151936),
                ("h200", "screened", 4096, 151936),
            )
        ),
    ],
)
def test_sizes_have_the_kernels_of_all_batch_sizes(chip, sampler, D, vocab, rows, calls):
    spec = EngineSpec(sampler, vocab, vocab, D, "bf16", None, rows)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    words = [json.dumps(spec), chip, str(calls), json.dumps(SIZES)]
    command = [sys.executable, "-c", COVERED, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {}
    assert len(engine_calls(spec)) == len(spec.kinds())

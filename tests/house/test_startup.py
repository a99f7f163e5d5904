"""Check what a start of fsbench loads, and that public calls need torch, triton and numpy alone."""

from __future__ import annotations

import json

from cells import cell
from forked import failures, run_forked
from tree import newest

from fsbench.records.cell import Round
from fsbench.records.store import Store

COMMAND = """
import os, sys
from fsbench.cli import main
os.chdir({folder!r})
sys.argv = ["fsbench", *{arguments!r}]
try:
    main()
finally:
    names = {{name.split(".")[0] for name in sys.modules}}
    print("LOADED", len(sys.modules), *sorted(names), file=sys.stderr)
"""

MODULES = 1000
"""Largest number of modules that a command loads: about half a second on an idle machine."""

FORBIDDEN = {"torch", "flashinfer", "cupti"}
READING = FORBIDDEN | {"triton"}
LISTING = FORBIDDEN | {"pandas", "scipy", "matplotlib"}  # triton, with numpy, is for samplers

COMMANDS: dict[str, tuple[set[str], str]] = {
    "--help": (LISTING, "Usage"),
    **{
        f"{name} --help": (LISTING, "Usage")
        for name in ("run", "hotvocab", "plot", "verify", "e2e")
    },
    "list": (LISTING, "flash_sampling"),
    "list --json": (LISTING, "{"),
    "iomodel": (LISTING, ""),
    "iomodel --json": (LISTING, "{"),
    "plot run --out plots": (READING, "wrote plots/"),
    f"compare {newest('paper')} --paper h200": (READING | {"matplotlib"}, "54 cells"),
    "iomodel --gpu none": (READING, ""),
}
"""Command -> packages that it must not load, and a part of its output."""


def test_commands_load_no_more_than_they_need(tmp_path):
    store = Store.create(tmp_path / "run", {"gpu": "NVIDIA H200", "device": "cuda"})
    for name, fused, time_us in (("fast", True, 10.0), ("slow", False, 20.0)):
        for b in (1, 2):
            one = cell(provider=name, label=name, fused=fused, b=b)
            store.append_round(one, 0, Round([time_us] * 8))
    store.close()
    scripts = [
        (command, COMMAND.format(folder=str(tmp_path), arguments=command.split()))
        for command in COMMANDS
    ]
    outputs = dict(zip(COMMANDS, run_forked(scripts, "import fsbench.cli"), strict=True))
    error = outputs.pop("iomodel --gpu none")
    assert error.code == 2 and error.err.startswith("error: gpu: expected one of a100")
    assert "torch" not in error.err.split()
    assert not failures([(name, "") for name in outputs], outputs.values())
    wrong = []
    for command, done in outputs.items():
        forbidden, part = COMMANDS[command]
        loaded = next(line for line in done.err.splitlines() if line.startswith("LOADED"))
        _, number, *names = loaded.split()
        if forbidden & set(names) or (forbidden is LISTING and int(number) >= MODULES):
            wrong.append(f"{command}: {number} modules, {sorted(forbidden & set(names))}")
        if "--json" in command:
            json.loads(done.out)
        if not done.out or part not in done.out:
            wrong.append(f"{command}: expected {part!r} in {done.out!r}")
    assert not wrong
    assert " matplotlib " in outputs["plot run --out plots"].err  # so the lists are complete
    assert list((tmp_path / "plots").glob("*.png"))


OTHERS = (
    *("scipy", "pandas", "matplotlib", "jinja2", "typer", "rich", "pynvml", "safetensors"),
    *("flashinfer", "cupti", "transformers", "vllm"),
)
"""All other packages that fsbench can use."""

WITHOUT_OTHERS = f"""
import sys
for name in {OTHERS!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import torch
"""

CALLS = """
import torch
from fsbench.kernels import (
    draft_sample, flash_sample, prepare_draft_vocabulary, prepare_head, score,
    screened_sample, truncated_sample, verify_drafts,
)
generator = torch.Generator().manual_seed(0)
hidden = torch.randn(3, 40, generator=generator)
weight = torch.randn(1000, 40, generator=generator)
seed = torch.tensor([7])
sample = flash_sample(hidden, weight, seed=seed, return_logprob=True, return_logz=True)
everything = truncated_sample(hidden, weight, seed=seed)
few = truncated_sample(hidden, weight, seed=seed, top_k=1)
screened = screened_sample(hidden, prepare_head(weight), seed=seed)
drafts = sample.tokens.view(1, 3)[:, :2]
verified = verify_drafts(sample.tokens.view(1, 3), drafts)
assert sample.valid.all() and sample.logprob.isfinite().all()
assert (everything.tokens == sample.tokens).all()
assert (few.tokens == (hidden @ weight.T).argmax(1)).all()
assert torch.equal(score(hidden, weight, sample.tokens).logprob, sample.logprob)
token_noise = flash_sample(hidden, weight, seed=seed, noise="token")
assert (screened.tokens == token_noise.tokens).all()
vocabulary = prepare_draft_vocabulary(torch.arange(1000), 1000)
drafted = draft_sample(hidden, weight, vocabulary, seed=seed)
assert (drafted.tokens == token_noise.tokens).all()
drafted = draft_sample(hidden, weight, vocabulary, seed=seed, top_k=1)
assert (drafted.tokens == few.tokens).all()
print(verified)
"""

HEADS = """
import torch
from fsbench.errors import ProviderUnavailable
from fsbench.kernels import load_head, prepare_head, save_head
head = prepare_head(torch.ones(16, 8))
for act in (lambda: save_head(head, "head"), lambda: load_head("head", head.weight)):
    try:
        act()
    except ProviderUnavailable as error:
        print(error)
"""

PLUG_IN = """
import os, sys
os.environ["FSBENCH_VLLM"] = "flash_sample"
from fsbench.errors import EngineMismatch
from fsbench.integrations.vllm import register
try:
    register()
except EngineMismatch as error:
    print(error)
loaded = [name for name in sys.modules if name.startswith("fsbench.baselines.")]
assert not loaded, loaded
assert "fsbench.kernels.gumbel_argmax" not in sys.modules
"""

WITHOUT_DISTRIBUTED = """
import sys, torch
torch.distributed.is_available = lambda: False
sys.modules["torch.distributed._symmetric_memory"] = None
from fsbench.kernels import flash_sample
hidden, weight = torch.ones(2, 8), torch.eye(8).repeat(4, 1)
print(flash_sample(hidden, weight, seed=torch.tensor([7])).valid.all())
"""

SCRIPTS = {
    "public calls draw on a CPU": (CALLS, "Verified"),
    "a head is not saved without safetensors": (HEADS, "pip install safetensors"),
    # vLLM imports the plug-in in every process. Without vLLM, register() reports the version.
    "the plug-in loads no other sampler": (PLUG_IN, "vllm: expected version"),
    # Some builds of torch lack torch.distributed, which only a VocabShard needs.
    "a torch without torch.distributed draws": (WITHOUT_DISTRIBUTED, "tensor(True)"),
}
"""What a script checks -> its code, and what it prints."""


def test_the_kernels_need_torch_triton_and_numpy_alone():
    scripts = [(name, code) for name, (code, _) in SCRIPTS.items()]
    outputs = run_forked(scripts, WITHOUT_OTHERS, {"TRITON_INTERPRET": None})
    assert not failures(scripts, outputs)
    for (name, (_, printed)), done in zip(SCRIPTS.items(), outputs, strict=True):
        assert printed in done.out, f"{name}: {done.out}"
    assert outputs[1].out.count("pip install") == 2

"""Check that the public calls of fsbench.kernels need torch, triton and numpy alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tree import ROOT

OTHERS = (
    *("scipy", "pandas", "matplotlib", "jinja2", "typer", "rich", "pynvml", "safetensors"),
    *("flashinfer", "cupti", "transformers", "vllm"),
)
"""All other packages that fsbench can use."""

WITHOUT = f"""
import sys
for name in {OTHERS!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
import torch
"""


def run_without_others(code: str) -> str:
    """Run a script in a process where the other packages cannot be imported; return its output."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_calls_draw_on_a_cpu():
    out = run_without_others("""
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
    """)
    assert "Verified" in out


def test_a_head_that_cannot_be_saved_names_the_package_that_is_missing():
    out = run_without_others("""
        from fsbench.errors import ProviderUnavailable
        from fsbench.kernels import load_head, prepare_head, save_head
        head = prepare_head(torch.ones(16, 8))
        for act in (lambda: save_head(head, "head"), lambda: load_head("head", head.weight)):
            try:
                act()
            except ProviderUnavailable as error:
                print(error)
    """)
    assert out.count("pip install safetensors") == 2


def test_the_plug_in_accepts_flash_sample_without_loading_other_samplers():
    """vLLM imports the plug-in in every process. Without vLLM, register() reports the version."""
    out = run_without_others("""
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
    """)
    assert "vllm: expected version" in out


def test_a_torch_without_torch_distributed_draws():
    """Some builds of torch lack torch.distributed, which only a VocabShard needs."""
    out = run_without_others("""
        torch.distributed.is_available = lambda: False
        sys.modules["torch.distributed._symmetric_memory"] = None
        from fsbench.kernels import flash_sample
        hidden, weight = torch.ones(2, 8), torch.eye(8).repeat(4, 1)
        print(flash_sample(hidden, weight, seed=torch.tensor([7])).valid.all())
    """)
    assert "tensor(True)" in out

"""Fixtures with a fake vLLM (tests/support/fake_vllm.py), and draws by the screened head."""

import numpy as np
import pytest

pytest.register_assert_rewrite("fake_vllm", "vllm_play")


@pytest.fixture
def vllm(monkeypatch):
    """Install the fake in vLLM's place, with the plug-in switched off."""
    from fake_vllm import install

    for name in ("FSBENCH_VLLM", "FSBENCH_VLLM_MARKS", "FSBENCH_VLLM_DRAFTS",
                 "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"):  # fmt: skip
        monkeypatch.setenv(name, "")
    np.random.seed(0)  # vLLM draws the seeds of unseeded requests from it
    return install(monkeypatch)


@pytest.fixture
def load(monkeypatch, vllm):
    """Return load(name, **parts): a runner of the fake with a loaded model, and the plug-in."""
    from fake_vllm import install

    from fsbench.integrations import vllm as plugin

    def loaded(name="flash_sample", **parts):
        modules = install(monkeypatch)
        monkeypatch.setenv("FSBENCH_VLLM", name)
        plugin.register()
        runner = modules["vllm.v1.worker.gpu.model_runner"].GPUModelRunner(**parts)
        runner.load_model()
        runner.modules = modules
        return runner

    return loaded


@pytest.fixture
def screens(monkeypatch):
    """Screen batches of up to three rows, on a CPU too; return the sizes of those screened."""
    from fsbench.kernels.screened import head

    sizes, draw = [], head.ScreenedHead.draw

    def counted(self, request, out):
        sizes.append(len(request.hidden))
        draw(self, request, out)

    monkeypatch.setattr(head, "worth_screening", lambda B, *_: (B <= 3, "by the test"))
    monkeypatch.setattr(head.ScreenedHead, "draw", counted)
    return sizes


@pytest.fixture
def filter_screens(monkeypatch):
    """Return, for each screened draw with filters, the logits computed of each row; -1 is all.

    Candidate lists are as long as on a GPU. Rows must be fp16: in bf16 no kernel runs on a CPU.
    """
    from filter_cases import roomy

    from fsbench.kernels.launch import launch_cache
    from fsbench.kernels.screened import filters as screened_filters
    from fsbench.kernels.screened import head

    computed, draw = [], head.ScreenedHead.draw_filtered

    def counted(self, request, filters, out):
        draw(self, request, filters, out)
        computed.append(out.found.tolist())

    monkeypatch.setattr(screened_filters, "filter_configs", roomy)
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})
    monkeypatch.setattr(head.ScreenedHead, "draw_filtered", counted)
    return computed

"""Makes fake_vllm.py importable by name, with assertions rewritten, and installs it."""

import numpy as np
import pytest

pytest.register_assert_rewrite("fake_vllm", "vllm_play")


@pytest.fixture
def vllm(monkeypatch):
    """The fake in vLLM's place, and nothing asked of the plug-in."""
    from fake_vllm import install

    for name in (
        *("FSBENCH_VLLM", "FSBENCH_VLLM_MARKS", "FSBENCH_VLLM_DRAFTS"),
        "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY",
    ):
        monkeypatch.setenv(name, "")
    np.random.seed(0)  # vLLM draws the seeds of requests that have none from it
    return install(monkeypatch)


@pytest.fixture
def screens(monkeypatch):
    """Batches of up to three rows are drawn by the screen, on a CPU too; how many were."""
    from fsbench.kernels.screened import head

    drawn, draw = [], head.ScreenedHead.draw

    def counted(self, request, out):
        drawn.append(len(request.hidden))
        draw(self, request, out)

    monkeypatch.setattr(head, "worth_screening", lambda B, *_: (B <= 3, "by the test"))
    monkeypatch.setattr(head.ScreenedHead, "draw", counted)
    return drawn


@pytest.fixture
def filter_screens(monkeypatch):
    """Of each draw of filters by the screen: how many logits of each row it computed; -1 is all.

    The lists are as long as on a GPU. Only rows of fp16 come here: of bf16 no kernel runs on a CPU.
    """
    from filter_cases import roomy

    from fsbench.kernels.screened import filters as screened_filters
    from fsbench.kernels.screened import head

    drawn, draw = [], head.ScreenedHead.draw_filtered

    def counted(self, request, filters, out):
        draw(self, request, filters, out)
        drawn.append(out.found.tolist())

    monkeypatch.setattr(screened_filters, "filter_configs", roomy)
    monkeypatch.setattr(head.ScreenedHead, "draw_filtered", counted)
    return drawn


@pytest.fixture
def load(monkeypatch, vllm):
    """A runner of the fake, with the plug-in registered and the model loaded."""
    from fake_vllm import install

    from fsbench.integrations import vllm as plugin

    def loaded(name="flash_sample", **parts):
        found = install(monkeypatch)
        monkeypatch.setenv("FSBENCH_VLLM", name)
        plugin.register()
        runner = found["vllm.v1.worker.gpu.model_runner"].GPUModelRunner(**parts)
        runner.load_model()
        runner.found = found
        return runner

    return loaded

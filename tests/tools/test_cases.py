"""The provider files in tools/cases: every case builds and draws what it should, on a CPU."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from tiny_run import TINY
from tree import ROOT
from typer.testing import CliRunner

from fsbench import inputs
from fsbench.cli import app
from fsbench.discover import discover
from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.tables import find
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

FILES = sorted((ROOT / "tools" / "cases").glob("*.py"))
SHIPPED = set(discover())
CASES = {name: entry for name, entry in discover(FILES).items() if name not in SHIPPED}
B, D, V = 4, 16, 260
SMALL = Problem(B, D, V, "fp32", device="cpu", logits="normal:3")


def launched(name, problem=SMALL):
    """(provider, hidden, weight, launch) of a case."""
    provider = CASES[name].provider
    weight, hidden = inputs.make_weight(problem, 0), inputs.make_hidden(problem, 0)
    return provider, hidden, weight, provider.build(problem, weight)


def drawn(name, problem=SMALL, step=3):
    _, hidden, _, launch = launched(name, problem)
    return launch(hidden, torch.tensor([5]), torch.tensor([step]))


def test_no_file_is_broken():
    assert len(CASES) > 40 and not [name for name, entry in CASES.items() if entry.broken]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, entry in CASES.items()
        if "cpu" in entry.provider.capabilities.devices
        and entry.provider.kind is not Kind.LOWER_BOUND
    ],
)
def test_a_case_passes_the_check_before_timing(name):
    provider, hidden, weight, launch = launched(name)
    assert provider.unsupported_reason(SMALL) is None
    check = check_on_problem(provider, SMALL, launch, hidden, weight)
    assert check.passed, check.detail


def test_an_option_with_the_distribution_of_the_problem_passes_the_gate(effort):
    """`fsbench run` does not time a sampler that fails it."""
    shapes = ((3, 2), (17, 129))
    effort("gate", shapes=shapes, any_shapes=shapes)
    provider = CASES["option_vocab_size"].provider
    (result,) = verify(provider, Setting("cpu", "fp32"), only=["greedy"])
    assert result.passed, result


FILTERED = [name for name in CASES if name.startswith("topk_topp_")]


@pytest.mark.parametrize("name", FILTERED)
def test_a_case_with_filters_draws_what_the_sampler_draws(name):
    problem = replace(SMALL, top_k=20, top_p=0.9)
    drawn_by = CASES[name].provider
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    step = (hidden, torch.tensor([5]), torch.tensor([3]))
    numbers = discover()["flash_sampling_topk_topp"].provider.build(problem, weight)
    assert drawn_by.build(problem, weight)(*step).equal(numbers(*step))


def test_each_field_of_a_filtered_draw_has_a_case():
    cases = {name.removeprefix("topk_topp_").replace("top_20", "top") for name in FILTERED}
    options = inspect.signature(truncated_sample).parameters
    fields = {name.removeprefix("return_") for name in options if name.startswith("return_")}
    assert cases == fields | {"tensors"}


def test_the_gradients_of_a_chunked_loss_are_those_of_the_whole_batch(monkeypatch):
    """The leaves are the launch's own, so what backward leaves in them is caught on the way."""
    leaves = []
    leave = torch.Tensor.requires_grad_
    monkeypatch.setattr(
        torch.Tensor, "requires_grad_", lambda leaf: leaves.append(leave(leaf)) or leaf
    )
    monkeypatch.setitem(CASES["gradient_chunked"].provider.build.__globals__, "CHUNK", 3)
    drawn("gradient_chunked")
    exact = [leave(leaf.detach().double()) for leaf in leaves]
    logits = exact[0] @ exact[1].T / SMALL.temperature
    targets = torch.tensor(SMALL.row_targets())
    torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
    for leaf, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad.double(), other.grad, atol=1e-5, rtol=1e-4)


def test_drafts_come_from_their_heads():
    for mode in ("sampled", "greedy"):
        exact, screened = (drawn(f"draft_reduced{word}_{mode}") for word in ("", "_screened"))
        assert exact.equal(screened)
    # All V tokens are among the reduced ones here.
    assert drawn("draft_reduced_greedy").equal(drawn("option_greedy"))
    close = [
        drawn(f"draft_{form}_greedy").eq(drawn("option_greedy")).sum() for form in ("int8", "fp8")
    ]
    assert min(close) >= B - 1


def test_verify_steps_are_of_whole_requests():
    verify = CASES["verify_token"].provider
    assert verify.unsupported_reason(replace(SMALL, B=6)) == (
        "takes 4 rows for each request, not 6 rows"
    )
    _, hidden, weight, launch = launched("verify_token")
    tokens = launch(hidden, torch.tensor([5]), torch.tensor([3]))
    first = flash_sample(
        hidden, weight, noise="token", seed=torch.arange(B), offset=torch.zeros(1).long()
    )
    assert tokens.shape == (B,) and tokens[0] == first.tokens[0]


def test_the_split_tiles_are_the_shipped_ones():
    tiles = CASES["hopper_split"].provider.build.func.__globals__["TILES"]
    assert HopperConfig(*tiles) == find("hopper", 1, 4096, "NVIDIA H200", (9, 0))


@pytest.mark.full
def test_a_case_is_measured_like_a_sampler(tmp_path):
    out = tmp_path / "run"
    command = ["run", *TINY, "--out", str(out), "--warmers", "0"]
    command += ["--provider", "option_bias", "--provider", "option_plain"]
    command += ["--provider-path", str(ROOT / "tools/cases/options.py")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    text = (out / "results.csv").read_text()
    assert "option_bias" in text and "option_plain" in text

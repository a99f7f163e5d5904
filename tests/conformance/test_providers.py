"""Rules that every sampler must satisfy; a new file is covered without an edit here.

A sampler that cannot run on CPUs is held to what can be asked without running it. Kernels run under
the interpreter in tests/kernels, on GPUs in files test_*_gpu.py.
"""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from plug_in import plug_in
from tiers import full
from torch.utils._python_dispatch import TorchDispatchMode

from fsbench.discover import Found, discover
from fsbench.inputs import make_hidden, make_weight
from fsbench.measure import presets
from fsbench.problem import DEVICES, DTYPES, PRESETS, Problem
from fsbench.provider import Kind, Launch, Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

ENTRIES = discover()
ON_CPU = {name: e.provider for name, e in ENTRIES.items() if not e.unavailable_reason("cpu")}
SAMPLERS = [name for name, made in ON_CPU.items() if made.kind is not Kind.LOWER_BOUND]
COMPILED = ("exponential_race", "score_log_softmax_compiled", "sort_top_k_top_p_compiled")

entries = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
samplers = pytest.mark.parametrize("name", SAMPLERS)

ODD = [(1, 16, 1), (3, 40, 2), (17, 72, 127), (1, 40, 1000), (17, 16, 1000), (3, 72, 20_011)]
"""Off the multiples of every tile; rows of 40 bf16 numbers are aligned to 16 bytes, not to 64."""


def counters(seed: int = 5, offset: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([seed]), torch.tensor([offset])


def built(made: Provider, problem: Problem) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    return made.build(problem, weight), hidden, weight


@entries
def test_it_is_described(entry: Found):
    made = entry.provider
    assert made is not None, entry.broken
    assert made.name == entry.name == entry.source.rsplit(".", 1)[1]
    assert made.label and sys.modules[entry.source].__doc__
    assert made.capabilities.devices and made.capabilities.dtypes
    assert not any("." in name for name in made.requires)
    assert [other.provider.label for other in ENTRIES.values()].count(made.label) == 1


def test_presets_are_those_of_run(tmp_path):
    assert tuple(presets.PRESETS) == PRESETS
    source = plug_in("mine").replace("build=build,", "build=build, presets=('papre',),")
    (tmp_path / "mine.py").write_text(source)
    broken = discover([tmp_path / "mine.py"])["mine"].broken
    assert "presets: expected some of paper, lean" in broken and "papre" in broken


@entries
def test_it_says_what_it_cannot_do(entry: Found):
    made = entry.provider
    able, dtype = made.capabilities, made.capabilities.dtypes[0]
    if refused := made.supports(Problem(4, 64, 1000, dtype)):
        assert able.quantized and "--weights" in refused
    problem = partial(Problem, weights=able.quantized[0] if refused else "")
    for device in DEVICES:
        reason = made.unsupported_reason(problem(4, 64, 1000, dtype, device=device))
        assert (reason is None) == (device in able.devices), reason
        assert reason is None or device in reason
    for other in set(DTYPES) - set(able.dtypes):
        reason = made.unsupported_reason(problem(4, 64, 1000, other, device=able.devices[0]))
        assert other in reason
    greedy = made.unsupported_reason(problem(4, 64, 1000, dtype, 0.0, able.devices[0]))
    if made.kind in (Kind.GREEDY, Kind.LOWER_BOUND) or able.zero_temperature:
        assert greedy is None
    else:
        assert "temperature 0" in greedy
    over_two = made.unsupported_reason(Problem(4, 64, 1000, dtype, device=able.devices[0], tp=2))
    assert over_two is None if made.build_sharded else "tp=2" in over_two


@entries
def test_it_never_crashes_when_asked(entry: Found):
    for B, D, V in [*ODD, (1024, 16384, 262208)]:
        for dtype in DTYPES:
            for device in DEVICES:
                for temperature in (0.0, 1e30):
                    problem = Problem(B, D, V, dtype, temperature, device)
                    reason = entry.provider.unsupported_reason(problem)
                    assert reason is None or (reason and "\n" not in reason)


@pytest.mark.parametrize("name", ["multinomial_compiled", *map(full, COMPILED)])
def test_it_draws_when_compiled(name, effort):
    """With Inductor; elsewhere torch.compile is the identity."""
    effort("gate", fit_draws=2**14, vocabulary=1000, any_shapes=((3, 129),))
    checks = list(verify(ON_CPU[name], Setting("cpu", "fp32")))
    assert checks and all(check.passed for check in checks), checks


@samplers
def test_it_passes_the_gate(name, eager, effort):
    """At a temperature whose neglect shows."""
    small = {"any_shapes": ((1, 1), (3, 2), (17, 129)), "truncated_draws": 2**11}
    effort("gate", fit_draws=2**12, vocabulary=1000, **small)
    checks = list(verify(ON_CPU[name], Setting("cpu", "fp32", 0.3)))
    assert checks and all(check.passed for check in checks), checks


@pytest.mark.parametrize(
    "name", [name if name == "multinomial" else full(name) for name in SAMPLERS]
)
def test_it_passes_the_battery(name, eager, effort):
    """The ci tier with fewer draws; `fsbench verify` runs it as it is."""
    draws = {"fit_draws": 2**14, "seed_draws": 2**11, "block_draws": 2**13, "tail_tokens": 2**23}
    shapes = ((1, 1), (3, 2), (17, 129), (16, 1000))
    sizes = {"shapes": shapes, "any_shapes": shapes, "sizes": (1, 17, 65), "any_sizes": (1, 17)}
    effort("ci", vocabulary=2051, seeds=4, **draws, **sizes)
    checks = list(verify(ON_CPU[name], Setting("cpu", "fp32"), "ci"))
    assert checks and all(check.verdict == "ok" for check in checks), checks


@pytest.mark.parametrize("name", ON_CPU)
def test_it_runs_at_odd_shapes(name, eager):
    made, dtypes = ON_CPU[name], ON_CPU[name].capabilities.dtypes
    for number, shape in enumerate(ODD):
        problem = Problem(*shape, dtypes[number % len(dtypes)], 0.8, "cpu")
        if made.unsupported_reason(problem):
            continue
        launch, hidden, weight = built(made, problem)
        if made.kind is Kind.LOWER_BOUND:
            launch(hidden, *counters())
        else:
            check = check_on_problem(made, problem, launch, hidden, weight)
            assert check.passed, (problem, check)


@samplers
def test_launches_are_independent_steps(name, eager):
    """Inputs stay as they were, no launch writes to an earlier output, each step draws again."""
    made = ON_CPU[name]
    problem = Problem(17, 40, 1000, made.capabilities.dtypes[0], 5.0, "cpu")
    launch, hidden, weight = built(made, problem)
    seed, offset = counters()
    inputs = [tensor.clone() for tensor in (hidden, weight, seed)]
    outputs, copies = [], []
    for _ in range(4):
        outputs.append(launch(hidden, seed, offset))
        copies.append(outputs[-1].clone())
        offset += 1
    assert offset == 13 and all(map(torch.equal, (hidden, weight, seed), inputs))
    launch(hidden.flip(0).contiguous(), *counters(6, 10))
    assert all(map(torch.equal, outputs, copies))
    if made.kind in (Kind.EXACT, Kind.TRUNCATED):
        assert len({tuple(tokens.tolist()) for tokens in copies}) == 4


# Samplers that store logits pad their weight


class Products(TorchDispatchMode):
    """Records the columns of each product whose right side is as wide as a head."""

    def __init__(self, D: int):
        super().__init__()
        self.D, self.columns = D, []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype):
            first, second = arguments[:2]
            if second.shape[0] == self.D and first.shape[1] == self.D:
                self.columns.append(second.shape[1])
        return operation(*arguments, **(options or {}))


UNPADDED = ("simple_full_v", "simple_offload", "simple_parallel", "simple_shvs")
"""SIMPLE's samplers write V columns, to where its processes read (docs/design/methodology.md)."""
STORING = [
    pytest.param(entry, device, id=f"{entry.name}-{device}", marks=mark)
    for entry in ENTRIES.values()
    if not entry.provider.capabilities.fused and entry.name not in UNPADDED
    for device, mark in (("cpu", ()), ("cuda", pytest.mark.gpu))
    if device in entry.provider.capabilities.devices
]


@pytest.mark.parametrize(("entry", "device"), STORING)
def test_a_sampler_that_stores_logits_pads_its_weight(entry, device, eager):
    """All logits are negative, so a zero of the padding would be the likeliest token."""
    if reason := entry.unavailable_reason(device):
        pytest.skip(reason)
    made, (B, D, V) = entry.provider, (3, 48, 1000)
    problem = Problem(B, D, V, made.capabilities.dtypes[0], 1.0, device)
    if reason := made.unsupported_reason(problem):
        pytest.skip(reason)
    hidden = torch.ones_like(make_hidden(problem, 0))
    weight = torch.full_like(make_weight(problem, 0), -2.0)
    weight[V - 1] = -0.5
    launch = made.build(problem, weight)
    with Products(D) as products:
        out = launch(hidden, *(counter.to(device) for counter in counters()))
    assert all(columns % 64 == 0 for columns in products.columns), (
        f"{entry.name} multiplies by {products.columns} columns of V = {V}: expected the weight of "
        "fsbench.provider.padded, made once in `build`"
    )
    if made.kind not in (Kind.LOWER_BOUND, Kind.SCORE):
        assert out.tolist() == [V - 1] * B


def test_an_unpadded_product_is_noticed():
    with Products(48) as products:
        torch.zeros(3, 48) @ torch.zeros(1000, 48).T
    assert products.columns == [1000]

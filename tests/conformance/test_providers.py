"""What every sampler must satisfy; a new file is covered without an edit here.

The CPU tier: a sampler that cannot run on CPUs is held to what can be asked without running it.
Kernels run under the interpreter in tests/kernels, on GPUs in files test_*_gpu.py.
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
from fsbench.provider import Kind, Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

FOUND = discover()
ON_CPU = [name for name, entry in FOUND.items() if not entry.unavailable_reason("cpu")]
SAMPLERS = [name for name in ON_CPU if FOUND[name].provider.kind is not Kind.LOWER_BOUND]

entries = pytest.mark.parametrize("entry", FOUND.values(), ids=FOUND)
on_cpu = pytest.mark.parametrize("name", ON_CPU)
samplers = pytest.mark.parametrize("name", SAMPLERS)


def quick(chosen: str) -> list:
    """All samplers, of which one is in make test."""
    return [name if name == chosen else full(name) for name in SAMPLERS]


ODD = [(B, D, V) for B in (1, 3, 17) for D in (16, 40, 72) for V in (1, 2, 127, 1000)]
"""Off the multiples of every tile; rows of 40 bf16 numbers are aligned to 16 bytes, not to 64."""


def provider(name: str) -> Provider:
    found = FOUND[name].provider
    assert found is not None
    return found


def _seeds() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([5]), torch.tensor([9])


@entries
def test_it_is_described(entry: Found):
    made = entry.provider
    assert made is not None, entry.broken
    assert made.name == entry.name == entry.source.rsplit(".", 1)[1]
    assert made.label
    assert isinstance(made.kind, Kind)
    assert set(made.capabilities.devices) <= set(DEVICES) and made.capabilities.devices
    assert set(made.capabilities.dtypes) <= set(DTYPES) and made.capabilities.dtypes
    assert sys.modules[entry.source].__doc__
    assert not any("." in name for name in made.requires)


def test_presets_are_those_of_run(tmp_path):
    assert tuple(presets.PRESETS) == PRESETS
    source = plug_in("mine").replace("build=build,", "build=build, presets=('papre',),")
    (tmp_path / "mine.py").write_text(source)
    broken = discover([tmp_path / "mine.py"])["mine"].broken
    assert "presets: expected some of paper, lean" in broken and "papre" in broken


def test_labels_are_all_different():
    labels = [entry.provider.label for entry in FOUND.values()]
    assert len(set(labels)) == len(labels)


@entries
def test_it_says_what_it_cannot_do(entry: Found):
    made = entry.provider
    able = made.capabilities
    dtype = able.dtypes[0]
    if refused := made.supports(Problem(4, 64, 1000, dtype)):
        assert able.quantized and "--weights" in refused
    problem = partial(Problem, weights=able.quantized[0] if refused else "")
    for device in DEVICES:
        reason = made.unsupported_reason(problem(4, 64, 1000, dtype, device=device))
        assert (reason is None) == (device in able.devices), reason
        if reason is not None:
            assert device in reason
    for other in DTYPES:
        reason = made.unsupported_reason(problem(4, 64, 1000, other, device=able.devices[0]))
        if other not in able.dtypes:
            assert other in reason
    greedy = made.unsupported_reason(problem(4, 64, 1000, dtype, 0.0, able.devices[0]))
    draws = made.kind not in (Kind.GREEDY, Kind.LOWER_BOUND)
    if draws and not able.zero_temperature:
        assert "temperature 0" in greedy
    else:
        assert greedy is None
    over_two = made.unsupported_reason(Problem(4, 64, 1000, dtype, device=able.devices[0], tp=2))
    assert over_two is None if made.build_sharded else "tp=2" in over_two


@entries
def test_it_never_crashes_when_asked(entry: Found):
    for B, D, V in [*ODD, (1024, 16384, 262208)]:
        for dtype in DTYPES:
            for device in DEVICES:
                for temperature in (0.0, 1e-30, 1.0, 1e30):
                    problem = Problem(B, D, V, dtype, temperature, device)
                    reason = entry.provider.unsupported_reason(problem)
                    assert reason is None or (reason and "\n" not in reason)


@pytest.mark.parametrize("name", quick("multinomial_compiled"))
def test_it_passes_verify(name):
    """Compiled for real, and at the full number of draws."""
    checks = list(verify(provider(name), Setting("cpu", "fp32")))
    assert checks
    assert all(check.passed for check in checks), checks


@samplers
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [("fp32", 0.3), full("bf16", 1.0), full("fp16", 1.0), full("fp32", 20.0)],
)
def test_it_passes_verify_in_other_settings(name, dtype, temperature, eager, effort):
    if dtype not in provider(name).capabilities.dtypes:
        pytest.skip(f"takes {provider(name).capabilities.dtypes}")
    effort("gate", fit_draws=2**14)
    checks = list(verify(provider(name), Setting("cpu", dtype, temperature)))
    assert checks
    assert all(check.passed for check in checks), checks


@pytest.mark.parametrize("name", quick("multinomial"))
def test_it_passes_the_battery(name, eager, effort):
    """The ci tier with a smaller vocabulary; `fsbench verify` runs it as it is."""
    effort("ci", vocabulary=2051)
    checks = list(verify(provider(name), Setting("cpu", "fp32"), "ci"))
    assert checks
    assert all(check.verdict == "ok" for check in checks), checks


@on_cpu
def test_it_runs_at_odd_shapes(name, eager):
    made = provider(name)
    for B, D, V in [*ODD, (17, 40, 20_011)]:
        for dtype in made.capabilities.dtypes:
            problem = Problem(B, D, V, dtype, 0.8, "cpu")
            if made.unsupported_reason(problem):
                continue
            hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
            launch = made.build(problem, weight)
            if made.kind is Kind.LOWER_BOUND:
                launch(hidden, *_seeds())
                continue
            check = check_on_problem(made, problem, launch, hidden, weight)
            assert check.passed, (problem, check)


@samplers
def test_at_temperature_zero_it_is_greedy(name, eager):
    made = provider(name)
    if not made.capabilities.zero_temperature:
        pytest.skip("does not take temperature 0")
    problem = Problem(17, 40, 1000, "fp32", 0.0, "cpu")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    tokens = made.build(problem, weight)(hidden, *_seeds())
    assert torch.equal(tokens.long(), (hidden @ weight.T).argmax(1))


@samplers
def test_it_leaves_its_inputs_as_they_were(name, eager):
    made = provider(name)
    problem = Problem(3, 40, 127, made.capabilities.dtypes[0], 0.8, "cpu")
    inputs = [make_hidden(problem, 0), make_weight(problem, 0), *_seeds()]
    before = [tensor.clone() for tensor in inputs]
    hidden, weight, seed, offset = inputs
    launch = made.build(problem, weight)
    for _ in range(2):
        launch(hidden, seed, offset)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


@samplers
def test_two_launches_do_not_share_their_output(name, eager):
    made = provider(name)
    problem = Problem(17, 40, 1000, made.capabilities.dtypes[0], 5.0, "cpu")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = made.build(problem, weight)
    first = launch(hidden, *_seeds())
    kept = first.clone()
    launch(hidden.flip(0).contiguous(), torch.tensor([6]), torch.tensor([10]))
    assert torch.equal(first, kept)


@samplers
def test_steps_draw_afresh(name, eager):
    made = provider(name)
    if made.kind not in (Kind.EXACT, Kind.TRUNCATED):
        pytest.skip("draws nothing")
    problem = Problem(17, 40, 1000, made.capabilities.dtypes[0], 5.0, "cpu")
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = made.build(problem, weight)
    seed, offset = _seeds()
    draws = []
    for _ in range(4):
        draws.append(launch(hidden, seed, offset).clone())
        offset += 1
    assert len({tuple(tokens.tolist()) for tokens in draws}) == 4


class Products(TorchDispatchMode):
    """Notes how many columns each matrix product has whose right side is as wide as a head."""

    def __init__(self, D: int):
        super().__init__()
        self.D, self.columns = D, []

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        if operation in (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype):
            left, right = arguments[:2]
            if right.shape[0] == self.D and left.shape[1] == self.D:
                self.columns.append(right.shape[1])
        return operation(*arguments, **(options or {}))


ALONE = ("simple_full_v", "simple_offload", "simple_parallel", "simple_shvs")
"""SIMPLE's samplers write V columns, to where its processes read (docs/design/methodology.md)."""
STORING = [
    pytest.param(entry, device, id=f"{entry.name}-{device}", marks=mark)
    for entry in FOUND.values()
    if not entry.provider.capabilities.fused and entry.name not in ALONE
    for device, mark in (("cpu", ()), ("cuda", pytest.mark.gpu))
    if device in entry.provider.capabilities.devices
]


@pytest.mark.parametrize(("entry", "device"), STORING)
def test_a_sampler_that_stores_logits_pads_its_weight(entry, device, eager):
    """Products have a multiple of 64 columns, made in `build`."""
    if reason := entry.unavailable_reason(device):
        pytest.skip(reason)
    made, (B, D, V) = entry.provider, (3, 48, 1000)
    problem = Problem(B, D, V, made.capabilities.dtypes[0], 1.0, device)
    if reason := made.unsupported_reason(problem):
        pytest.skip(reason)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    launch = made.build(problem, weight)
    with Products(D) as seen:
        launch(hidden, *(counter.to(device) for counter in _seeds()))
    assert all(columns % 64 == 0 for columns in seen.columns), (
        f"{entry.name} multiplies by {seen.columns} columns of V = {V}: expected the weight of "
        "fsbench.provider.padded, made once in `build`"
    )


def test_an_unpadded_product_is_noticed():
    with Products(48) as seen:
        torch.zeros(3, 48) @ torch.zeros(1000, 48).T
    assert seen.columns == [1000]

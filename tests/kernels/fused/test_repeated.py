"""Calls like an earlier one: they go past the checks, draw the same, and pass by no refusal."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from flash_sample_cases import TILES, counter, problem
from repeating import Checked
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fsbench.errors import InvalidType
from fsbench.kernels import Sample, flash_sample
from fsbench.kernels.call import repeated

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread", "nothing_known")]
CHECKS = "fsbench.kernels.fused.api.checked_request"
B, V, D = 3, 140, 32


def given(seed: int = 0, sigma: float = 2.0, **changes: object) -> dict:
    hidden, weight = problem(B, V, D, sigma=sigma)
    found = {"hidden": hidden, "weight": weight, "seed": counter(seed), "offset": counter(5)}
    return found | {"temperature": 1.0} | changes


def empty() -> Sample:
    return Sample(torch.empty(B, dtype=torch.int64), torch.empty(B, dtype=torch.bool))


@pytest.mark.parametrize(
    "pair",
    [
        (1.0, 0.3),
        (0.0, 0.0),
        (torch.ones(B), torch.tensor([0.0, 0.4, torch.nan])),
    ],
    ids=["float", "greedy", "of each row"],
)
def test_it_draws_what_a_checked_call_draws(pair, checks_raise):
    first, second = pair
    flash_sample(**given(temperature=first))
    other = given(seed=7, sigma=1.0, temperature=second)
    expected = flash_sample(**other, out=empty())
    checks_raise()
    drawn = flash_sample(**other)
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.valid.tolist() == expected.valid.tolist()
    assert drawn[2:] == (None,) * len(drawn[2:])
    assert flash_sample(**other).tokens.data_ptr() != drawn.tokens.data_ptr()


def test_a_parameter_is_a_weight_like_any(checks_raise):
    flash_sample(**given())
    weight = torch.nn.Parameter(given()["weight"])
    checks_raise()
    flash_sample(**given(weight=weight))


def shifted(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 0]


MATRICES = given()
OTHERS = [
    {"hidden": MATRICES["hidden"][:2].clone()},
    {"hidden": MATRICES["hidden"].half()},
    {"hidden": MATRICES["hidden"].to("meta")},
    {"hidden": shifted(MATRICES["hidden"])},
    {"hidden": strided(MATRICES["hidden"])},
    {"weight": MATRICES["weight"][:-1].clone()},
    {"weight": MATRICES["weight"].half()},
    {"weight": MATRICES["weight"].to("meta")},
    {"weight": shifted(MATRICES["weight"])},
    {"weight": strided(MATRICES["weight"])},
    {"seed": counter(*range(B))},
    {"seed": counter(0).int()},
    {"seed": None},
    {"offset": counter(*range(B))},
    {"offset": counter(0).int()},
    {"offset": None},
    {"temperature": 0.0},
    {"temperature": torch.ones(B)},
    {"temperature": torch.ones(B).double()},
    {"temperature": torch.ones(1)},
    {"vocab_size": 1},
    {"vocab_size": 2},
    {"vocab_size": 1.0},
    {"noise": "token"},
    {"kernel": "token"},
]


def kind_of(**changes: object) -> object:
    values = [changes.pop(name, None) for name in ("vocab_size", "noise", "kernel")]
    return repeated.plain_kind((), (), tuple(values), *(MATRICES | changes).values())


def test_a_kind_is_of_all_that_checks_and_launches_look_at():
    kinds = [kind_of(), *(kind_of(**changes) for changes in OTHERS)]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    assert kind_of(temperature=0.3) == kind_of(temperature=7.0)


def test_a_vocabulary_a_noise_and_a_kernel_are_of_a_kind(checks_raise):
    options = [{"vocab_size": V - 1}, {"vocab_size": V}, {"noise": "token"}, {"noise": "group"}]
    options += [{"kernel": "portable"}]
    for option in options:
        flash_sample(**given(**option))
    others = [given(seed=9, sigma=1.0, **option) for option in options]
    expected = [flash_sample(**other, out=empty()).tokens.tolist() for other in others]
    checks_raise()
    assert [flash_sample(**other).tokens.tolist() for other in others] == expected
    for option in (
        {"vocab_size": V - 2},
        {"vocab_size": float(V)},
        {"noise": "group4"},
        {"kernel": "hopper"},
    ):
        with pytest.raises(Checked):
            flash_sample(**given(**option))


def test_options_and_their_plain_values_have_equal_lengths():
    with pytest.raises(ValueError, match=r"shorter|longer"):
        repeated.plain_kind((None, "an option of later"), (None,), (), *MATRICES.values())


NEVER = [True, 1, 0, -1.0, 1e-40, 1e40, float("nan"), float("inf"), "1"]


@pytest.mark.parametrize("temperature", NEVER, ids=str)
def test_any_other_temperature_is_looked_at(temperature):
    assert kind_of(temperature=temperature) is None


OPTIONS = {
    "bias": (torch.zeros(V),),
    "mask": (torch.ones(B, V, dtype=torch.bool),),
    "num_samples": (2, True, 1.0),
    "soft_cap": (30.0,),
    "vocab_size": (V, V - 1),
    **dict.fromkeys(
        ["return_logprob", "return_logz", "return_entropy", "return_rank"], (True, 1, 0)
    ),
    "return_top": (1, False),
    "noise": ("token", "gumbel", None),
    "shard": ("a shard",),
    "out": (empty(),),
    "kernel": ("portable", "hopper", None),
    "config": (TILES,),
}
"""Every option, with values that no plain call has; some are equal to one that it has."""


def test_every_option_goes_by_the_checks(checks_raise):
    flash_sample(**given())
    checks_raise()
    flash_sample(**given())
    assert {*OPTIONS, *given()} == set(inspect.signature(flash_sample).parameters)
    for name, values in OPTIONS.items():
        for value in values:
            with pytest.raises(InvalidType if name == "shard" else Checked):
                flash_sample(**given(**{name: value}))


def test_what_has_no_memory_goes_by_the_checks(checks_raise):
    arguments = given()
    flash_sample(**arguments)
    checks_raise()
    T = arguments.pop("temperature")
    fakes = {name: FakeTensorMode().from_tensor(x) for name, x in arguments.items()}
    with pytest.raises(Checked):
        flash_sample(**fakes, temperature=T)
    several = torch.stack([arguments.pop("hidden")] * 2)
    with pytest.raises(Checked):
        torch.vmap(lambda hidden: flash_sample(hidden, **arguments, temperature=T))(several)


def test_a_compiled_call_is_an_operator_whatever_is_known():
    arguments = given()
    expected = flash_sample(**arguments)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda: flash_sample(**arguments), backend=backend, fullgraph=True)
    assert compiled().tokens.tolist() == expected.tokens.tolist()
    assert "fsbench.flash_sample" in graphs[0]
    flash_sample(**given(temperature=0.0))
    compiled()
    assert len(graphs) == 1  # compiled once, whatever has become known since


def test_no_tensor_is_kept_alive():
    arguments = given(temperature=torch.ones(B))
    for _ in range(2):
        flash_sample(**arguments)
    assert repeated._launches
    alive = [weakref.ref(x) for x in arguments.values()]
    arguments.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * 5


def test_where_no_kernel_runs_nothing_is_kept(monkeypatch):
    flash_sample(**given())
    monkeypatch.setattr(repeated, "runs_kernels", lambda device, dtype: False)
    kind = kind_of(noise="auto", kernel="auto")
    assert kind in repeated._launches
    assert repeated.launch_of(kind, MATRICES["hidden"]) is None
    flash_sample(**given(temperature=torch.ones(B)))
    assert len(repeated._launches) == 1


def test_the_table_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(repeated, "_MOST", 2)
    for T in (1.0, 0.0, torch.ones(B)):
        flash_sample(**given(temperature=T))
    assert len(repeated._launches) == 1

"""The launches of a call: those of truncated.launch's table, prepared once for each key."""

from __future__ import annotations

import re
from collections import Counter
from unittest import mock

import pytest
import torch
from flash_sample_cases import CPU, SEED, TILES, counter, normal_logits, stored
from torch import Tensor
from truncated_cases import history

from fsbench.kernels import Penalties, truncated_sample
from fsbench.kernels.device.stored_logits import StoredLogits, largest_of_groups
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.request import Filters, checked_request
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.truncated import launch, top_p

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

B, V = 2, 640  # 20 groups
ROWS = torch.tensor([0.9, 0.8])
MANY = torch.tensor([3, 0], dtype=torch.int32)
KERNELS = ("redraw", "look", "narrow", "cutoff", "race")
CASES = {
    "none, and tokens alone are asked for": [{}, {"top_k": -1, "top_p": 1.5, "min_p": -1.0}],
    "top_p alone, one number from 0.25 on": [{"top_p": 0.9}, {"top_p": 0.25, "min_p": -1.0}],
    "top_k, one number up to 448": [
        {"top_k": 3},
        {"top_k": 448, "top_p": 0.5},
        {"top_k": 3, "top_p": ROWS, "min_p": ROWS, "penalties": True},
    ],
    "neither top_k nor top_p": [
        {"min_p": 0.1},
        {"min_p": ROWS},
        {"penalties": True},
        {"return_kept": True},
        {"return_logprob": True, "min_p": 0.2},
    ],
    "top_k, one number up to 2048 and below the groups": [
        {"top_k": 500},
        {"top_k": 500, "top_p": 0.5},
    ],
    "others": [
        {"top_p": 0.9, "penalties": True},
        {"top_p": 0.9, "return_kept": True},
        {"top_k": 500, "groups": 20, "return_kept": True},
        {"top_p": ROWS, "return_support": 3},
    ],
    "others, where rows may be tested": [
        {"top_p": 0.2},
        {"top_p": 0.9, "min_p": 0.1},
        {"top_p": ROWS},
        {"top_k": MANY},
        {"top_k": 500, "groups": 20},
        {"top_k": MANY, "return_logprob": True},
    ],
}
"""By the beginning of a row of the table: calls that take these launches."""


def table() -> dict[str, tuple[str, ...]]:
    """Return the columns of each row by its filters."""
    cell = r" +(2 n - 1|\d|no|yes)"
    rows = re.findall(rf"^    (\S.*?) {cell * 5}$", launch.__doc__, re.M)
    return {row[0]: row[1:] for row in rows}


def test_every_row_of_the_table_has_cases():
    assert [name.removesuffix(" (*)") for name in table()] == list(CASES)


class Recorder:
    """Launches of the filters' kernels, recorded in place of made; later ones are direct.

    Attributes:
        bound: the number of launches that Triton would bind.
        launches: kernel, grid, and arguments by name. A pointer is the name of the input, or the
            shape and dtype of memory that the call allocates.
    """

    def __init__(self) -> None:
        self.bound, self.launches = 0, []
        self._memory: dict[int, object] = {}

    def bind(self, kernel, grid, arguments, moving):
        if not kernel.__name__.startswith("sampling_"):
            return None
        self.bound += 1
        integers = {name for name in moving if isinstance(arguments[name], int)}
        assert integers <= set(kernel.kwargs["do_not_specialize"])  # later ones have other values
        pointers = {name for name, x in arguments.items() if isinstance(x, Tensor)}

        def direct(values) -> None:
            call = arguments | dict(zip(moving, values, strict=True))
            for name in pointers:
                call[name] = self._memory.get(call[name], "unknown")
            self.launches.append((kernel.__name__, grid, call))

        direct([x.data_ptr() if isinstance(x, Tensor) else x for x in map(arguments.get, moving)])
        return direct

    def launches_of(self, **call) -> list:
        """Make a call of truncated_sample, and return its launches."""
        self.launches.clear()
        inputs = {name: x for name, x in call.items() if isinstance(x, Tensor)}
        if "penalties" in call:
            inputs |= vars(call["penalties"].history) | call["penalties"]._asdict()
        inputs |= vars(workspace(B, CPU))
        self._memory = {x.data_ptr(): name for name, x in inputs.items() if isinstance(x, Tensor)}
        allocate = torch.empty

        def empty(*shape, dtype, device) -> Tensor:
            x = allocate(*shape, dtype=dtype, device=device)
            self._memory[x.data_ptr()] = shape, dtype
            return x

        with mock.patch.object(torch, "empty", empty):
            truncated_sample(**call)
        return list(self.launches)


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})
    monkeypatch.setattr(launch_cache, "_bound", recorder.bind)
    monkeypatch.setattr(launch, "launch_fields", lambda *_: None)
    return recorder


@pytest.mark.parametrize(("row", "call"), [(row, call) for row in CASES for call in CASES[row]])
def test_a_call_launches_what_the_table_says(row, call, recorder):
    call, groups = dict(call), call.get("groups")
    call.pop("groups", None)
    if call.pop("penalties", False):
        call["penalties"] = Penalties(history(B, V), 1.2)
    # More groups than top_k, unless the case says how many there are: V is small.
    launches_for = launch.launches_for
    with mock.patch.object(
        launch, "launches_for",
        lambda filters, B, n, **flags: launches_for(filters, B, groups or 10_000, **flags),
    ):  # fmt: skip
        made = recorder.launches_of(**stored(normal_logits(B, V)), seed=SEED, **call)
    names = [name.removeprefix("sampling_").removesuffix("_kernel") for name, *_ in made]
    launched = Counter(names)
    cells = next(cells for name, cells in table().items() if name.removesuffix(" (*)") == row)
    if "top_p" in call and cells[0] == "2 n - 1":
        cells = (str(2 * top_p.tests_needed(call["top_p"], B) - 1), *cells[1:])
    expected = [int({"no": "0", "yes": "1"}.get(cell, cell)) for cell in cells]
    assert [launched[kernel] for kernel in KERNELS] == expected
    assert sum(launched.values()) == sum(expected)


def penalized(repetition=1.2, presence=0.5, frequency=0.1, capacity=80) -> Penalties:
    return Penalties(history(B, V, capacity), repetition, presence, frequency)


REPEATED = [
    ({"top_p": 0.9}, {"top_p": 0.91}),
    ({"top_p": 0.9, "seed": counter(1, 2)}, {"top_p": 0.9, "temperature": 0.5}),
    ({"top_k": 3}, {"top_k": 5, "top_p": 0.5, "min_p": 0.1}),
    ({"min_p": 0.1, "offset": counter(4)}, {"min_p": 0.2}),
    ({"top_k": 500, "offset": counter(4, 5)}, {"top_k": 501}),
    ({"top_p": 0.9, "min_p": 0.1}, {"top_p": 0.8, "min_p": 0.2}),
    ({"top_p": ROWS, "temperature": ROWS}, {"top_p": ROWS / 2}),
    ({"top_k": MANY, "min_p": ROWS, "return_kept": True}, {"min_p": ROWS / 2}),
    ({"penalties": penalized()}, {"penalties": penalized(1.3, 0.6, 0.2)}),
    ({"penalties": penalized(ROWS, ROWS + 1, ROWS + 2), "top_p": 0.9}, {"top_p": 0.8}),
]
"""A call, and what changes in a later one of the same key."""


@pytest.mark.parametrize(("call", "changes"), REPEATED)
def test_a_later_call_prepares_nothing_and_has_the_arguments_of_a_first_one(
    call, changes, recorder, monkeypatch
):
    call = {**stored(normal_logits(B, V)), "seed": SEED, **call}
    recorder.launches_of(**call)
    bound, recorder.bound = recorder.bound, 0
    later = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()} | changes
    with (
        mock.patch.object(launch, "FilterLaunch", None),
        mock.patch.object(launch.fused.launch, "FusedLaunch", None),
    ):
        launches = recorder.launches_of(**later)
    assert recorder.bound == 0
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})
    assert launches == recorder.launches_of(**later) and recorder.bound == bound
    assert not any("unknown" in arguments.values() for _, _, arguments in launches)


def test_only_the_first_search_computes_the_mass_before_the_draw(recorder):
    call = {**stored(normal_logits(B, V)), "seed": SEED, "top_p": 0.2}
    narrow = [x["before_ptr"] for name, _, x in recorder.launches_of(**call) if "narrow" in name]
    assert [pointer is None for pointer in narrow] == [False, True, True]


def test_calls_with_other_numbers_of_tests_have_other_launches(recorder):
    """Their shapes and types are equal."""
    call = {**stored(normal_logits(B, V)), "seed": SEED}
    for p in (0.9, 0.3, 0.9, 0.3):
        launches = recorder.launches_of(**call, top_p=p)
        assert len(launches) == 2 * top_p.tests_needed(p, B) - 1
        assert [arguments["LAST"] for _, _, arguments in launches[-2:]] == [False, True]


def shifted(x: Tensor) -> Tensor:
    """The same numbers at an address that is no multiple of 16."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def with_history(**tensors: Tensor) -> Penalties:
    penalties = penalized()
    vars(penalties.history).update(tensors)
    return penalties


SEEN = history(B, V)
CHANGES = [
    {},
    stored(normal_logits(B + 1, V)),
    stored(normal_logits(B, V + 1)),
    stored(normal_logits(B, V + 128)),
    {"seed": counter(1, 2)},
    {"seed": shifted(counter(1))},
    {"offset": counter(1)},
    {"offset": counter(1, 2)},
    {"temperature": 0.0},
    {"temperature": ROWS},
    {"temperature": shifted(ROWS)},
    {"noise": "token"},
    {"top_p": 0.5},  # more tests
    {"top_p": 0.2},
    {"top_p": ROWS},
    {"top_p": shifted(ROWS)},
    {"top_k": 3},
    {"top_k": 100},  # in more groups
    {"top_k": MANY},
    {"top_k": MANY.long()},
    {"top_p": 1.0, "min_p": 0.1},
    {"min_p": ROWS},
    {"config": TILES},
    *({f"return_{name}": True} for name in ("kept", "logprob", "kept_logprob", "rank")),
    {"return_logprob": True, "logprob_temperature": 0.5},
    {"return_support": 3},
    {"return_support": 4},
    {"return_top": 3},
    *({"penalties": penalized(**each)} for each in ({}, {"capacity": 81})),
    *({"penalties": penalized(**{n: ROWS})} for n in ("repetition", "presence", "frequency")),
    *(
        {"penalties": with_history(**{name: shifted(getattr(SEEN, name))})}
        for name in ("tokens", "counts", "lengths")
    ),
]
SAME = [
    {"top_p": 0.91, "temperature": 0.5},
    {"seed": counter(9)},
    {"top_k": 0, "min_p": -1.0},
    stored(normal_logits(B, V, sigma=3.0)),
]


class Key(Exception):
    """The key of a call, in place of its launches."""


@pytest.fixture
def key_of(monkeypatch):
    """Return key_of(function, ...), the key of the launches of a call."""

    def stop(key, *_: object) -> None:
        raise Key(key)

    monkeypatch.setattr(launch, "cached", stop)

    def key_of(function, *arguments, **options) -> object:
        with pytest.raises(Key) as raised:
            function(*arguments, **options)
        return raised.value.args[0]

    return key_of


def call_of(changes: dict) -> dict:
    return {**stored(normal_logits(B, V)), "seed": SEED, "top_p": 0.9} | changes


def test_keys_differ_by_all_that_decides_the_launches(key_of):
    keys = [key_of(truncated_sample, **call_of(changes)) for changes in CHANGES]
    for i, key in enumerate(keys):
        assert key is not None and keys.index(key) == i, CHANGES[i]
    assert {key_of(truncated_sample, **call_of(changes)) for changes in SAME} == {keys[0]}


def test_keys_for_logits_of_another_head_differ_by_their_layout(key_of):
    off = dict.fromkeys(("offset", "soft_cap", "bias", "mask", "vocab_size"))
    hidden, weight = torch.zeros(B, 16), torch.zeros(V, 16)
    request = checked_request(hidden, weight, seed=SEED, temperature=1.0, **off)
    sample = TruncatedSample(torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.bool))
    logits, wider = torch.zeros(B, V), torch.zeros(B, V + 128)
    pairs = [(x, largest_of_groups(x)) for x in (logits, wider)]
    pairs += [(shifted(logits), pairs[0][1]), (logits, shifted(pairs[0][1]))]
    filters = Filters(0, 0.9, 0.0)
    keys = [key_of(launch.finish, request, StoredLogits(*x), filters, None, sample) for x in pairs]
    assert len(set(keys)) == len(pairs)


def test_calls_of_several_keys_do_not_disturb_each_other(monkeypatch):
    """The constants of a kernel, such as whether seeds differ by row, decide tokens."""
    per_row = [{"seed": counter(1, 2)}, {"offset": counter(1, 2)}, {"temperature": ROWS}]
    filters = [{"top_p": ROWS}, {"top_k": 3}, {"top_k": MANY}, {"penalties": penalized()}]
    one: dict = {}
    for changes in [{}, *per_row, *filters]:
        drawn = []
        for cache in (one, {}):
            monkeypatch.setattr(launch_cache, "LAUNCHES", cache)
            drawn.append(truncated_sample(**call_of(changes)).tokens.tolist())
        assert drawn[0] == drawn[1], changes

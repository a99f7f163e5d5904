"""Which kernel flash_sample runs, on a GPU that can run both."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.kernels import describe
from fsbench.kernels.configs import choice as _choice
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig

PORTABLE = TileConfig(16, 256, 64, 128, False, False, 4, 1, 1)
HOPPER = HopperConfig(1, 128, 64, 2, False)


@pytest.fixture
def both(monkeypatch):
    """A GPU that can run both kernels; what is chosen for it is forgotten afterwards."""
    monkeypatch.setattr(_choice, "why_not_hopper", lambda *facts: None)
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 64)
    monkeypatch.setattr(_choice, "default_config", lambda *shape: PORTABLE)
    monkeypatch.setattr(_choice, "hopper_config", lambda *shape: HOPPER)
    _choice.config_for.cache_clear()
    yield
    _choice.config_for.cache_clear()


def imitate(monkeypatch, name: str, index: int) -> torch.device:
    """Return a device that no other test uses, since the choice for a device is cached."""
    cuda = _choice.torch.cuda
    facts = SimpleNamespace(
        name=name, shared_memory_per_block_optin=232448, multi_processor_count=132
    )
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (9, 0))
    return torch.device("cuda", index)


@pytest.fixture
def h200(monkeypatch):
    return imitate(monkeypatch, "NVIDIA H200", 7)


@pytest.fixture
def h100(monkeypatch):
    return imitate(monkeypatch, "NVIDIA H100 80GB HBM3", 6)


def chosen(B: int, V: int = 500, **wish: object) -> object:
    return _choice.choose(torch.zeros(B, 64), torch.zeros(V, 64), "group", **wish)


def test_the_number_of_rows_decides(both):
    assert [chosen(B) for B in (1, 32, 64)] == 3 * [PORTABLE]
    assert [chosen(B) for B in (33, 40, 63, 65, 1000)] == 5 * [HOPPER]


def test_where_two_warpgroups_are_needed_rows_may_be_missing(both, monkeypatch):
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 128)
    assert [chosen(B) for B in (33, 65, 128)] == 3 * [PORTABLE]
    assert chosen(129) == HOPPER


def test_blocks_are_split_where_the_last_round_would_be_short(both, monkeypatch):
    """On 4 multiprocessors: five blocks leave room for three of 16 KiB."""
    monkeypatch.setattr(_choice, "WORTH_SPLITTING", 3 * 2**14)
    whole = HopperConfig(1, 128, 64, 2, False)
    split = HopperConfig(1, 128, 64, 2, False, split=True)
    monkeypatch.setattr(_choice, "hopper_config", lambda *shape: whole)
    assert [chosen(B, 4 * 128 + 1) for B in (1, 33, 64)] == 3 * [split]
    assert chosen(65, 4 * 128 + 1) == whole
    assert chosen(1, 4 * 128) == chosen(1, 3 * 128) == chosen(1, 8 * 128) == PORTABLE
    assert chosen(1, 8 * 128, kernel="hopper") == whole
    assert chosen(1, 9 * 128, kernel="hopper") == split
    assert chosen(1, 10 * 128, kernel="hopper") == whole
    assert chosen(1, 9 * 128, kernel="portable") == PORTABLE
    wide = HopperConfig(1, 256, 64, 2, False)
    monkeypatch.setattr(_choice, "hopper_config", lambda *shape: wide)
    _choice.config_for.cache_clear()
    assert chosen(1, 4 * 128 + 1) == PORTABLE and chosen(33, 4 * 128 + 1) == wide


def test_a_split_that_there_is_no_kernel_for_is_refused(both):
    with pytest.raises(InvalidArgument, match="at most 64 rows with split; got 65"):
        chosen(65, config=HopperConfig(1, 128, 64, 2, False, split=True))
    with pytest.raises(InvalidArgument, match="split: expected False but with 1 warpgroup"):
        HopperConfig(2, 128, 64, 2, False, split=True)


@pytest.mark.parametrize("B", [1, 64, 65, 1000])
def test_of_options_the_noise_alone_decides_and_of_the_dtype_its_bytes(both, B):
    """The sentences of flash_sample's docstring and of docs/design/kernels.md about "auto"."""

    def kernel(noise: str = "group", dtype: torch.dtype = torch.bfloat16, **wish: object) -> type:
        hidden, weight = torch.zeros(B, 64).bfloat16(), torch.zeros(500, 64).to(dtype)
        return type(_choice.choose(hidden, weight, noise, **wish))

    usual = TileConfig if B <= 64 else HopperConfig
    assert {kernel(), kernel(dtype=torch.float16), kernel(narrow=True), kernel("none")} == {usual}
    assert kernel("token") is TileConfig
    assert kernel("token", kernel="hopper") is HopperConfig
    assert kernel(dtype=torch.int8) is (TileConfig if B <= 32 else HopperConfig)


@pytest.mark.parametrize("B", [1, 1000])
def test_a_wish_is_granted(both, B):
    assert chosen(B, kernel="hopper") == HOPPER
    assert chosen(B, kernel="portable") == PORTABLE
    own = HopperConfig(1, 128, 64, 3, False)
    assert chosen(B, config=own) == own


def test_a_bias_or_a_mask_asks_for_narrow_tiles(both, monkeypatch):
    wide, narrow = HopperConfig(2, 256, 64, 4, True), HopperConfig(2, 128, 64, 7, True)
    monkeypatch.setattr(_choice, "hopper_config", lambda *asked: narrow if asked[4] else wide)
    assert chosen(128) == wide and chosen(128, narrow=True) == narrow
    assert chosen(128, narrow=True, config=wide) == wide
    assert chosen(64, narrow=True) == PORTABLE


@pytest.mark.parametrize(
    ("B", "expected"),
    [
        (192, HopperConfig(3, 128, 64, 5, False)),
        (193, HopperConfig(2, 256, 64, 4, True)),
        (300, HopperConfig(2, 256, 64, 4, True)),
    ],
)
def test_three_warpgroups_have_no_registers_for_wide_tiles_and_a_mask(h200, B, expected):
    assert _choice.hopper_config(B, 8192, 128_256, h200, True) == expected
    assert (_choice.hopper_config(B, 8192, 128_256, h200) == expected) == (B == 193)


@pytest.mark.parametrize(
    ("B", "D", "narrow", "most"),
    [
        (129, 4096, False, 160),
        (160, 2560, False, 160),
        (161, 4096, False, 192),
        (192, 2560, False, 192),
        (128, 4096, False, None),  # not slower there
        (193, 4096, False, None),
        (257, 4096, False, None),
        (160, 8192, False, None),  # not measured
        (160, 4096, True, None),
    ],
)
def test_log_probabilities_have_tiles_of_their_own_where_they_were_measured(
    h100, monkeypatch, B, D, narrow, most
):
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 128)
    plain = _choice.hopper_config(B, D, 151_936, h100, narrow)
    with_sums = _choice.hopper_config(B, D, 151_936, h100, narrow, True)
    assert with_sums == (_choice.TILES_WITH_SUMS[most] if most else plain)
    assert (with_sums != plain) == (most is not None)


def test_log_probabilities_have_the_tiles_of_plain_calls_on_an_h200(h200, monkeypatch):
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 64)
    for B in (129, 192):
        sums = _choice.hopper_config(B, 4096, 151_936, h200, False, True)
        assert sums == _choice.hopper_config(B, 4096, 151_936, h200)


def test_where_the_hopper_kernel_cannot_run():
    assert isinstance(chosen(1000), TileConfig)
    with pytest.raises(InvalidArgument, match="got hopper, but it needs a GPU"):
        chosen(1000, kernel="hopper")


SMALL = 149 * 128
"""Tokens of a head that leaves 115 of 132 multiprocessors idle in its second round."""
EXPLAINED = [
    (
        1,
        {"V": SMALL},
        "the hopper kernel: it splits blocks of 128 tokens, as whole ones would leave room for "
        "121 MB in their last round; tile shapes for B <= 64 on GPUs '*' (r",
    ),
    (65, {"V": SMALL}, "the hopper kernel: B = 65 is above 64 rows; tile shapes for B <= 128, D"),
    (1, {"V": SMALL, "noise": "token"}, "no times of the hopper kernel's token noise have been"),
    (1, {}, "the portable kernel: B = 1 is at most 64 rows; tile shapes for B <= 16 on GPUs '*H2"),
    (
        65,
        {},
        "the hopper kernel: B = 65 is above 64 rows; tile shapes for B <= 128, D <= 6144 on GP",
    ),
    (40, {}, "the hopper kernel: B = 40 fills not all of 64 rows, of which it loads those alone"),
    (65, {"noise": "token"}, "no times of the hopper kernel's token noise have been taken; tile"),
    (
        65,
        {"kernel": "portable"},
        "the portable kernel, as asked for; tile shapes for B <= 128",
    ),
    (65, {"config": HOPPER}, "the hopper kernel, as asked for; tile shapes as given"),
    (256, {}, "the hopper kernel: B = 256 is above 64 rows; tile shapes for B <= 256 on"),
    (257, {}, "; 2 blocks of 160 rows leave least to a program; tile shapes for B <= 256 on"),
    (321, {}, "; 3 blocks of 128 rows leave least to a program; tile shapes for B <= 256 on"),
    (576, {}, "; 3 blocks of 192 rows leave least to a program; tile shapes for B <= 256 on"),
]


@pytest.mark.parametrize(("B", "wish", "expected"), EXPLAINED)
def test_the_choice_is_explained_by_its_rule_and_its_row(h200, B, wish, expected):
    asked = {"by_tma": True, "noise": "group", "kernel": "auto", "config": None} | wish
    V = asked.pop("V", 151_936)
    text = _choice.explanation(B, 4096, V, h200, **asked)
    assert expected in text
    if "config" not in wish:
        assert "(record: " in text


def test_large_batches_are_cut_into_the_blocks_that_leave_least_to_a_program(h200):
    two, three = HopperConfig(2, 256, 64, 4, True), HopperConfig(3, 256, 64, 4, True)
    paired = HopperConfig(3, 256, 64, 4, True, paired=True)
    expected = {
        **dict.fromkeys((193, 256), two),
        **dict.fromkeys((257, 320), paired),
        **dict.fromkeys((321, 384, 385, 512), two),
        **dict.fromkeys((513, 576), three),
    }
    found = {B: _choice.hopper_config(B, 4096, 151_936, h200) for B in expected}
    assert found == expected


CHIPS = {
    "H200": (132, 1980000, 3201000, 6144, 64),
    "H100": (132, 1980000, 2619000, 5120, 128),
    "slow tensor cores": (78, 700000, 3201000, 6144, 16),
    "clocks not told": (132, 0, 0, 0, 64),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_how_many_rows_the_portable_kernel_takes_follows_from_the_memory(monkeypatch, chip):
    programs, clock, memory, bits, expected = CHIPS[chip]
    facts = SimpleNamespace(multi_processor_count=programs)
    if clock:
        facts.clock_rate, facts.memory_clock_rate, facts.memory_bus_width = clock, memory, bits
    monkeypatch.setattr(_choice.torch.cuda, "get_device_properties", lambda device: facts)
    _choice.portable_rows.cache_clear()
    assert _choice.portable_rows(torch.device("cuda", 7)) == expected
    _choice.portable_rows.cache_clear()


@pytest.mark.parametrize(("capability", "loads"), [((8, 9), False), ((9, 0), True)])
def test_matrices_are_loaded_by_pointers_where_there_is_no_tma(monkeypatch, capability, loads):
    monkeypatch.setattr(_choice.torch.cuda, "get_device_capability", lambda device: capability)
    _choice.has_tma.cache_clear()
    device = torch.device("cuda", 7)
    matrix = SimpleNamespace(
        device=device, data_ptr=lambda: 0, shape=(2, 8), element_size=lambda: 2
    )
    assert _choice.tma_possible(matrix) == loads
    _choice.has_tma.cache_clear()


def test_one_matrix_that_tma_cannot_load_is_enough():
    fits, shifted, narrow = torch.zeros(2, 8), torch.zeros(17)[1:].view(2, 8), torch.zeros(2, 6)
    assert _choice.tma_possible(fits, fits)
    for other in (shifted, narrow):
        assert not _choice.tma_possible(fits, other)
        assert not _choice.tma_possible(other, fits)


def test_describe_explains_when_it_is_asked_to():
    matrices = torch.zeros(2, 64), torch.zeros(500, 64)
    plain, told = describe(*matrices), describe(*matrices, why=True)
    assert told.startswith(f"{plain}: the portable kernel: the hopper kernel cannot run, it needs")
    assert told.endswith("tile shapes for the interpreter")

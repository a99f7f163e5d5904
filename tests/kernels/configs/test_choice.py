"""The choice of a kernel and its tile shapes, on a GPU that can run both."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from imitated_gpus import H100, H200, imitate_gpu

from fsbench.discover import discover
from fsbench.errors import InvalidArgument
from fsbench.kernels import describe
from fsbench.kernels.configs import choice as _choice
from fsbench.kernels.configs.epilogue import DRAW, Epilogue
from fsbench.kernels.configs.gpu import is_hopper
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.problem import Problem

PORTABLE = TileConfig(16, 256, 64, 128, False, False, 4, 1, 1)
HOPPER = HopperConfig(1, 128, 64, 2, False)
PROCESSED, SUMS, STORED = (Epilogue(**{part: True}) for part in Epilogue._fields)
BOTH = Epilogue(sums=True, stored=True)


@pytest.fixture
def both(monkeypatch):
    """A GPU that can run both kernels; cached choices are cleared afterwards."""
    monkeypatch.setattr(_choice, "why_not_hopper", lambda *facts: None)
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 64)
    monkeypatch.setattr(_choice, "default_config", lambda *shape: PORTABLE)
    monkeypatch.setattr(_choice, "hopper_config", lambda *shape: HOPPER)
    _choice.config_for.cache_clear()
    yield
    _choice.config_for.cache_clear()


@pytest.fixture
def gpu(monkeypatch):
    return partial(imitate_gpu, monkeypatch)


def chosen(B: int, V: int = 500, **options: object) -> object:
    return _choice.choose(torch.zeros(B, 64), torch.zeros(V, 64), "group", **options)


def test_the_number_of_rows_decides(both, monkeypatch):
    assert [chosen(B) for B in (1, 32, 64)] == 3 * [PORTABLE]
    assert [chosen(B) for B in (33, 40, 63, 65, 1000)] == 5 * [HOPPER]
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 128)  # of two warpgroups
    _choice.config_for.cache_clear()
    assert [chosen(B) for B in (33, 64, 128)] == 3 * [PORTABLE]
    assert [chosen(B) for B in (65, 127, 129)] == 3 * [HOPPER]
    assert [chosen(B, epilogue=SUMS) for B in (64, 65, 127, 128)] == [
        PORTABLE,
        HOPPER,
        HOPPER,
        PORTABLE,
    ]
    assert [chosen(B, epilogue=STORED) for B in (96, 97)] == [HOPPER, PORTABLE]
    assert [chosen(B, epilogue=BOTH) for B in (65, 80, 129)] == 3 * [HOPPER]
    assert [chosen(B, epilogue=BOTH) for B in (64, 81, 127)] == 3 * [PORTABLE]


def test_blocks_are_split_where_the_last_round_would_be_short(both, monkeypatch):
    """On 4 multiprocessors five blocks leave three programs idle, for blocks of 16 KiB."""
    monkeypatch.setattr(_choice, "WORTH_SPLITTING", 3 * 2**14)
    whole, split = HOPPER, HopperConfig(1, 128, 64, 2, False, split=True)
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


def test_a_split_of_more_rows_is_refused(both):
    with pytest.raises(InvalidArgument, match="at most 64 rows with split; got 65"):
        chosen(65, config=HopperConfig(1, 128, 64, 2, False, split=True))


@pytest.mark.parametrize("B", [1, 64, 65, 1000])
def test_the_noise_and_the_bytes_of_the_dtype_decide_and_no_other_option(both, B):
    """As flash_sample's docstring and docs/design/kernels.md say of "auto"."""

    def kernel(
        noise: str = "group", dtype: torch.dtype = torch.bfloat16, **options: object
    ) -> type:
        hidden, weight = torch.zeros(B, 64).bfloat16(), torch.zeros(500, 64).to(dtype)
        return type(_choice.choose(hidden, weight, noise, **options))

    usual = TileConfig if B <= 64 else HopperConfig
    assert {kernel(), kernel(dtype=torch.float16), kernel("none")} == {usual}
    assert {kernel(epilogue=each) for each in (PROCESSED, SUMS, STORED)} == {usual}
    assert kernel("token") is TileConfig
    assert kernel("token", kernel="hopper") is HopperConfig
    assert kernel(dtype=torch.int8) is (TileConfig if B <= 32 else HopperConfig)


@pytest.mark.parametrize("B", [1, 1000])
def test_a_requested_kernel_or_config_is_taken(both, B):
    assert chosen(B, kernel="hopper") == HOPPER
    assert chosen(B, kernel="portable") == PORTABLE
    config = HopperConfig(1, 128, 64, 3, False)
    assert chosen(B, config=config) == config


def test_a_bias_or_a_mask_needs_narrow_tiles(both, monkeypatch):
    wide, narrow = HopperConfig(2, 256, 64, 4, True), HopperConfig(2, 128, 64, 7, True)
    monkeypatch.setattr(
        _choice, "hopper_config", lambda *facts: narrow if facts[4].processed else wide
    )
    assert chosen(128) == wide and chosen(128, epilogue=PROCESSED) == narrow
    assert chosen(128, epilogue=PROCESSED, config=wide) == wide
    assert chosen(64, epilogue=PROCESSED) == PORTABLE


@pytest.mark.parametrize(
    ("B", "expected"),
    [
        (192, HopperConfig(3, 128, 64, 5, False)),
        (193, HopperConfig(2, 256, 64, 4, True)),
        (300, HopperConfig(2, 256, 64, 4, True)),
    ],
)
def test_three_warpgroups_have_no_registers_for_wide_tiles_and_a_mask(gpu, B, expected):
    h200 = gpu(H200)
    assert _choice.hopper_config(B, 8192, 128_256, h200, PROCESSED) == expected
    assert (_choice.hopper_config(B, 8192, 128_256, h200) == expected) == (B == 193)


@pytest.mark.parametrize(
    ("epilogue", "B", "D", "expected"),
    [
        (SUMS, 256, 2560, "g2v128d64p7"),
        (SUMS, 257, 8192, "g2v256d64p4r16"),
        (SUMS, 288, 2560, "g2v256d64p4r16"),
        (SUMS, 320, 2560, "g2v256d64p4r32"),
        (STORED, 208, 4096, "g2v128d64p7"),
        (STORED, 256, 8192, "g2v128d64p7"),
        (BOTH, 200, 4096, "g2v128d64p7"),
        (SUMS, 128, 4096, None),  # not slower
        (SUMS, 193, 4096, None),
        (SUMS, 321, 4096, None),
        (SUMS, 129, 4096, None),
        (SUMS, 192, 8192, None),
        (SUMS, 289, 4096, None),
        (STORED, 192, 8192, None),
        (STORED, 207, 4096, None),
        (STORED, 257, 4096, None),
        (STORED, 256, 8256, None),
        (BOTH, 129, 8192, None),
        (BOTH, 199, 4096, None),
        (BOTH, 320, 4096, None),
    ],
)
def test_sums_and_stored_logits_have_other_tiles_on_an_h100(gpu, epilogue, B, D, expected):
    check_tiles(gpu(H100), epilogue, B, D, expected)


@pytest.mark.parametrize(
    ("epilogue", "B", "D", "expected"),
    [
        (SUMS, 129, 2560, "g3v128d64p5"),
        (SUMS, 288, 8192, "g2v256d64p4r16"),
        (SUMS, 320, 4096, "g2v256d64p4r32"),
        (STORED, 160, 2560, "g3v128d64p5"),
        (BOTH, 160, 4096, "g3v128d64p5"),
        (SUMS, 129, 4096, None),
        (SUMS, 192, 2560, None),
        (SUMS, 320, 8192, None),
        (STORED, 129, 4096, None),
        (STORED, 257, 4096, None),
        (BOTH, 129, 8192, None),
        (BOTH, 257, 4096, None),
    ],
)
def test_sums_and_stored_logits_have_other_tiles_on_an_h200(gpu, epilogue, B, D, expected):
    check_tiles(gpu(H200), epilogue, B, D, expected)


def check_tiles(device, epilogue, B, D, expected):
    """Compare the Hopper kernel's tiles with these, or with those of plain calls."""
    shape = (B, D, 151_936)
    tiles, plain = (_choice.hopper_config(*shape, device, each) for each in (epilogue, DRAW))
    assert str(tiles) == (f"hopper-{expected}" if expected else str(plain))
    changed = _choice.hopper_config(*shape, device, epilogue._replace(processed=True))
    assert changed == _choice.hopper_config(*shape, device, PROCESSED)


@pytest.mark.parametrize(
    ("epilogue", "B", "D", "portable"),
    [
        (SUMS, 192, 4096, False),
        (SUMS, 193, 4096, True),
        (SUMS, 200, 2560, False),
        (BOTH, 208, 2560, True),
        (BOTH, 224, 2560, False),
        (BOTH, 224, 4096, True),
        (BOTH, 225, 8192, False),
        (STORED, 208, 2560, True),
        (STORED, 224, 2560, False),
        (STORED, 224, 8192, True),
        (DRAW, 192, 4096, False),
        (DRAW, 193, 4096, False),
        (DRAW, 193, 2560, False),
        (DRAW, 199, 8192, False),
        (DRAW, 200, 4096, False),
        (PROCESSED, 193, 4096, False),
    ],
)
def test_an_h200_has_the_portable_kernel_at_some_rows_above_192(gpu, epilogue, B, D, portable):
    facts = (B, D, 151_936, gpu(H200), 2, True, "group", "auto", None, epilogue)
    assert isinstance(_choice.config_for(*facts), TileConfig) == portable


@pytest.mark.parametrize(
    ("B", "D", "epilogue", "hopper"),
    [
        (33, 8192, DRAW, True),
        (64, 8192, DRAW, False),
        (160, 8192, DRAW, True),
        (160, 8192, SUMS, False),
        (160, 4096, DRAW, False),
        (193, 8192, DRAW, False),
        (257, 8192, DRAW, True),
    ],
)
def test_an_h200_has_the_hopper_kernel_for_token_noise_where_it_is_faster(
    gpu, B, D, epilogue, hopper
):
    facts = (B, D, 128_256, gpu(H200), 2, True, "token", "auto", None, epilogue)
    assert isinstance(_choice.config_for(*facts), HopperConfig) == hopper


def test_the_kernel_for_token_noise_is_explained(gpu):
    facts = {"by_tma": True, "noise": "token", "kernel": "auto", "config": None}
    text = _choice.explanation(160, 8192, 128_256, gpu(H200), **facts)
    assert text.startswith("the hopper kernel: B = 160 is between 129 and 192, with token noise; ")


EXPLAINED = [
    # 115 of 132 multiprocessors would be idle in the second round
    (1, {"V": 149 * 128}, "it splits blocks of 128 tokens, as programs could read 121 MB more in"),
    (
        1,
        {"V": 149 * 128, "noise": "token"},
        "the portable kernel: the hopper kernel is not chosen here with token noise; tile shapes",
    ),
    (1, {}, "the portable kernel: B = 1 is at most 64 rows; tile shapes for B <= 16 on GPUs '*H2"),
    (65, {}, "the hopper kernel: B = 65 is above 64 rows; tile shapes for B <= 128, D <= 6144 on"),
    (
        40,
        {},
        "the hopper kernel: B = 40 is less than 64 rows, which the portable kernel would compute",
    ),
    (65, {"kernel": "portable"}, "the portable kernel, as requested; tile shapes for B <= 128"),
    (65, {"config": HOPPER}, "the hopper kernel, as requested; tile shapes as given"),
    (
        257,
        {},
        "; 2 blocks of 160 rows give the busiest program least work; tile shapes for B <= 25",
    ),
]


@pytest.mark.parametrize(("B", "options", "expected"), EXPLAINED)
def test_the_choice_is_explained_by_its_rule_and_its_row(gpu, B, options, expected):
    facts = {"by_tma": True, "noise": "group", "kernel": "auto", "config": None, **options}
    V = facts.pop("V", 151_936)
    text = _choice.explanation(B, 4096, V, gpu(H200), **facts)
    assert expected in text and ("(record: " in text) == ("config" not in options)


@pytest.mark.parametrize(
    ("epilogue", "B", "expected"),
    [
        (SUMS, 127, "the hopper kernel: B = 127 is less than 128 rows, which the portable kernel"),
        (
            BOTH,
            81,
            "the portable kernel: B = 81 is between 81 and 127, with log-probabilities",
        ),
        (SUMS, 128, "the portable kernel: B = 128 is at most 128 rows"),
        (
            SUMS,
            160,
            "; tile shapes for B <= 160 on GPUs '*H100*' (record: results/h100/tile-shapes-",
        ),
        (SUMS, 257, "; the tile shapes for log-probabilities (record: results/h100/tile-shapes-"),
        (SUMS, 193, "; tile shapes for B <= 256"),
    ],
)
def test_the_choice_with_other_work_is_explained(gpu, epilogue, B, expected):
    facts = {"by_tma": True, "noise": "group", "kernel": "auto", "config": None}
    facts["epilogue"] = epilogue
    assert expected in _choice.explanation(B, 4096, 151_936, gpu(H100), **facts)


def test_describe_knows_calls_with_log_probabilities(both, monkeypatch):
    monkeypatch.setattr(_choice, "portable_rows", lambda device: 128)
    matrices = torch.zeros(90, 64), torch.zeros(500, 64)
    assert describe(*matrices) == describe(*matrices, return_logprob=True) == str(HOPPER)
    assert describe(*matrices, top_k=5) == str(HOPPER)
    assert describe(*matrices, top_k=5, return_logprob=True).startswith(str(PORTABLE))
    problem = Problem(90, 64, 500, "bf16")
    launch = discover()["flash_score"].provider.build(problem, matrices[1].bfloat16())
    assert launch.config.startswith(str(HOPPER))  # what records say of score


def test_an_h200_has_mixed_blocks_for_129_to_160_rows(gpu):
    facts = {"by_tma": True, "noise": "group", "kernel": "auto", "config": None}
    for D, epilogue in product((4096, 8192), (DRAW, SUMS, STORED)):
        shape = (D, 151_936, gpu(H200), epilogue)
        extra = [_choice.hopper_config(B, *shape).extra_rows for B in (129, 144, 145, 160, 161)]
        assert extra == [16, 16, 32, 32, 0]
    text = _choice.explanation(150, 4096, 151_936, gpu(H200), **facts, epilogue=SUMS)
    assert "; tile shapes for B <= 160 on GPUs '*H200*'" in text
    text = _choice.explanation(150, 4096, 151_936, gpu(H200), **facts, epilogue=BOTH)
    assert "; the tile shapes for log-probabilities and stored logits (record: results/h200" in text


def test_large_batches_are_cut_such_that_the_busiest_program_has_least_work(gpu):
    h200 = gpu(H200)
    two, three = HopperConfig(2, 256, 64, 4, True), HopperConfig(3, 256, 64, 4, True)
    paired = HopperConfig(3, 256, 64, 4, True, paired=True)
    expected = {
        **dict.fromkeys((193, 256), two),
        **dict.fromkeys((257, 320), paired),
        **dict.fromkeys((321, 384, 385, 512), two),
        **dict.fromkeys((513, 576), three),
    }
    assert expected == {B: _choice.hopper_config(B, 4096, 151_936, h200) for B in expected}


@pytest.mark.parametrize(
    ("programs", "clocks", "expected"),
    [
        (132, (1980000, 3201000, 6144), 64),  # H200
        (132, (1980000, 2619000, 5120), 128),  # H100
        (78, (700000, 3201000, 6144), 16),  # slow tensor cores
        (132, (), 64),  # torch reports no clocks
    ],
)
def test_the_rows_of_the_portable_kernel_follow_from_the_memory(
    monkeypatch, programs, clocks, expected
):
    names = ("clock_rate", "memory_clock_rate", "memory_bus_width")
    facts = SimpleNamespace(
        multi_processor_count=programs, **dict(zip(names, clocks, strict=False))
    )
    monkeypatch.setattr(_choice.torch.cuda, "get_device_properties", lambda device: facts)
    assert _choice.portable_rows.__wrapped__(torch.device("cuda", 7)) == expected


@pytest.mark.parametrize(("capability", "loads"), [((8, 9), False), ((9, 0), True)])
def test_matrices_are_loaded_by_tma_if_the_gpu_has_it(monkeypatch, capability, loads):
    monkeypatch.setattr(_choice.torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(_choice, "has_tma", _choice.has_tma.__wrapped__)
    matrix = SimpleNamespace(
        device=torch.device("cuda", 7), data_ptr=lambda: 0, shape=(2, 8), element_size=lambda: 2
    )
    assert _choice.tma_possible(matrix) == loads


@pytest.mark.parametrize(("hip", "expected"), [(None, True), ("6.4", False)])
def test_a_gpu_of_amd_is_no_hopper(monkeypatch, hip, expected):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert is_hopper(torch.device("cuda", 7)) == expected


def test_one_matrix_that_tma_cannot_load_is_enough():
    fits, shifted, narrow = torch.zeros(2, 8), torch.zeros(17)[1:].view(2, 8), torch.zeros(2, 6)
    assert _choice.tma_possible(fits, fits)
    for other in (shifted, narrow):
        assert not _choice.tma_possible(fits, other)
        assert not _choice.tma_possible(other, fits)


def test_without_a_gpu_the_portable_kernel_runs_and_describe_explains_why():
    assert isinstance(chosen(1000), TileConfig)
    with pytest.raises(InvalidArgument, match="got hopper, but it needs a GPU"):
        chosen(1000, kernel="hopper")
    matrices = torch.zeros(2, 64), torch.zeros(500, 64)
    plain, explained = describe(*matrices), describe(*matrices, why=True)
    assert explained.startswith(f"{plain}: the portable kernel: the hopper kernel cannot run, it ")
    assert explained.endswith("tile shapes for the interpreter")

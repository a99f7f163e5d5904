"""Tables of tile shapes: every kernel, bucket and D has a config on any GPU; files are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs import tables
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.configs.screen import HopperScreenConfig, ScreenConfig
from fsbench.kernels.configs.tables import KERNELS, find, read
from fsbench.kernels.providing.tuning import text

SHIPPED = Path(tables.__file__).with_name("tiles")
H200, H100, OTHER = "NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA L40S"
FIRST, SECOND = HopperConfig(1, 128, 64, 2, False), HopperConfig(1, 128, 64, 3, False)
ENTRY = (
    "{ bucket = 64, warpgroups = 1, block_v = 128, block_d = 64, num_stages = 2, "
    "contiguous = false }"
)


@pytest.fixture
def user_file(monkeypatch, tmp_path):
    """Return a function that writes the file of FSBENCH_TILES."""

    def write(content):
        path = tmp_path / "user.toml"
        path.write_text(content)
        monkeypatch.setenv("FSBENCH_TILES", str(path))
        tables._all_rows.cache_clear()
        return path

    yield write
    tables._all_rows.cache_clear()


def file(kernels='["hopper"]', gpus='["*"]', entry=ENTRY):
    return f'[[tiles]]\nkernels = {kernels}\ngpus = {gpus}\nrecord = "r"\nconfigs = [{entry}]\n'


@pytest.mark.parametrize("gpu", [H200, H100, OTHER, ""])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_gpu_has_a_config(kernel, gpu):
    for B in (1, 16, 17, 64, 65, 129, 257):
        for D in (8, 8192, 16384):
            assert isinstance(find(kernel, B, D, gpu), KERNELS[kernel][0])


def test_shipped_configs_are_those_that_were_measured():
    wide, narrow = find("portable", 128, 8192, H200), find("portable", 128, 6144, H200)
    assert str(wide) == "b128v256d64s16Nfw8p4x1"
    assert str(narrow) == "b128v128d128s16Nfw8p3x1"
    assert str(find("portable-token", 256, 4096, H200)) == "b256v128d64s16Nw16p4x1"
    for kernel in KERNELS:
        for gpu in (H100, "NVIDIA GH200 480GB"):
            assert find(kernel, 256, 8192, gpu) == find(kernel, 256, 8192, H200)
    assert [find("hopper", B, 4096, H200) for B in (1, 65, 161, 1024)] == [
        HopperConfig(1, 128, 128, 4, False),
        HopperConfig(2, 128, 128, 3, False),
        HopperConfig(3, 128, 64, 5, False),
        HopperConfig(2, 256, 64, 4, True),
    ]
    assert [find("hopper", B, 8192, H200) for B in (65, 161)] == [
        HopperConfig(2, 256, 64, 4, False),
        HopperConfig(3, 256, 64, 4, False),
    ]
    for D in (4096, 8192):
        rests = [find("hopper", B, D, H200).extra_rows for B in (128, 129, 144, 145, 160, 161)]
        assert rests == [0, 16, 16, 32, 32, 0]
        assert find("hopper", 129, D, H100) == find("hopper", 192, D, H100)
    assert str(find("portable", 64, 4096, OTHER)) == "b64v128d64s16Nw8p3x1"


def test_an_unknown_hopper_gpu_begins_with_the_tiles_of_a_known_one():
    for B in (16, 128, 256):
        assert find("portable", B, 4096, OTHER, (9, 0)) == find("portable", B, 4096, H200)
        assert find("portable", B, 4096, OTHER, (8, 0)) == find("portable", B, 4096, OTHER)


def test_the_longest_name_wins_and_then_the_smallest_d(user_file, tmp_path):
    rows = [(64, 1024, FIRST), (64, None, SECOND)]
    user_file(text("hopper", "NVIDIA X", "r", rows) + file(gpus='["*X*", "*"]', entry=ENTRY))
    assert find("hopper", 64, 1024, "NVIDIA X") == FIRST
    assert find("hopper", 64, 1025, "NVIDIA X") == SECOND
    assert find("hopper", 64, 1025, "NVIDIA XL") == FIRST
    backwards = text("hopper", "NVIDIA X", "r", rows[::-1])
    user_file(backwards)
    assert find("hopper", 64, 1024, "NVIDIA X") == FIRST


def test_the_users_file_goes_first_and_need_not_have_every_bucket(user_file):
    before = {(kernel, B): find(kernel, B, 4096, H200) for kernel in KERNELS for B in (64, 128)}
    user_file(file())
    after = {(kernel, B): find(kernel, B, 4096, H200) for kernel in KERNELS for B in (64, 128)}
    assert after.pop(("hopper", 64)) == FIRST != before.pop(("hopper", 64))
    assert after == before


def test_a_table_of_several_kernels_is_for_each(user_file):
    shipped = (SHIPPED / "untuned.toml").read_text()
    user_file(shipped)
    for kernel in ("portable", "portable-token"):
        assert find(kernel, 16, 4096, H200) == find(kernel, 16, 4096, OTHER)


def test_written_tables_are_read_back(tmp_path):
    tiles = TileConfig(16, 128, 64, 16, True, False, 4, 4, 2)
    mixed = HopperConfig(2, 256, 64, 4, False, extra_rows=32)
    tables_of_file = [
        text("hopper", 'A "[x]" \\ GPU', "a.csv", [(64, 6144, FIRST), (64, None, SECOND)]),
        text("portable-token", "B*", "b", [(16, None, tiles)]),
        text("portable", "C", "nothing could be timed", []),
        text("hopper", "D", "d", [(160, None, mixed)]),
    ]
    path = tmp_path / "x.toml"
    path.write_text("\n".join(tables_of_file))
    rows = read(path)
    assert [(row.kernel, row.bucket, row.config) for row in rows] == [
        ("hopper", 64, FIRST),
        ("hopper", 64, SECOND),
        ("portable-token", 16, tiles),
        ("hopper", 160, mixed),
    ]
    assert rows[0].max_d == 6144 < rows[1].max_d
    assert tables.fnmatchcase('A "[x]" \\ GPU', rows[0].gpu)
    assert not tables.fnmatchcase("Bx", rows[2].gpu)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("tiles = [", "expected a TOML file of tables; got "),
        ("", ".tiles: expected list; got nothing"),
        ("tile = []", "expected one of tiles; got 'tile'; did you mean 'tiles'?"),
        ("tiles = [3]", "tiles[0]: expected a table of kernels, gpus, record, configs; got 3"),
        ("[[tiles]]", "tiles[0].kernels: expected list; got nothing"),
        (file(kernels='["hoper"]'), "tiles[0].kernels: expected one of hopper, portable, "),
        (file(kernels="[[1]]"), "tiles[0].kernels: expected one of hopper, portable, "),
        (file(gpus='"H200"'), "tiles[0].gpus: expected list; got 'H200'"),
        (file() + "gpu = 1", "tiles[0]: expected one of configs, gpus, kernels, record; got 'gpu'"),
        (file(entry="1"), "tiles[0].configs[0]: expected a table of bucket, warpgroups, "),
        (file(entry=ENTRY + ", {}"), "tiles[0].configs[1].bucket: expected int; got nothing"),
        (
            file(entry=ENTRY.replace("64", "65", 1)),
            "tiles[0].configs[0].bucket: expected one of (64, 128, 144, 160, 192, 256); got 65",
        ),
        (
            file(entry=ENTRY.replace("block_d = 64", "block_d = 32")),
            "tiles[0].configs[0].block_d: expected 64 or 128 or 256; got 32",
        ),
        (
            file(entry=ENTRY.replace("false", "0")),
            "tiles[0].configs[0].contiguous: expected bool; got 0",
        ),
        (
            file(entry=ENTRY.replace("block_v", "blok_v")),
            "tiles[0].configs[0]: expected one of block_d, block_v, bucket, contiguous, "
            "num_stages, warpgroups; got 'blok_v'; did you mean 'block_v'?",
        ),
        (
            file(entry=ENTRY.replace("bucket", 'max_d = "x", bucket')),
            "tiles[0].configs[0].max_d: expected int; got 'x'",
        ),
    ],
)
def test_a_mistake_is_named_with_file_and_entry(user_file, content, message):
    path = user_file(content)
    with pytest.raises(InvalidArgument) as error:
        find("hopper", 64, 4096, H200)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


def test_a_missing_file_is_named(user_file):
    user_file("").unlink()
    with pytest.raises(InvalidArgument, match=r"user\.toml: expected a TOML file .*No such"):
        find("hopper", 64, 4096, H200)


def test_files_are_read_once(user_file, monkeypatch):
    user_file(file())
    find("hopper", 64, 4096, H200)
    monkeypatch.setattr(tables, "read", None)
    assert find("hopper", 64, 8192, OTHER) == FIRST


SCREENED = (
    "{ bucket = 16, block_b = 32, split = 1, block_v = 128, block_d = 256, num_stages = 4 },"
    "{ bucket = 8, block_b = 8, block_v = 128, block_d = 128, slice = 128, v_on_m = true, "
    "flatten = true, num_warps = 4, num_stages = 3, ctas_per_sm = 2 }"
)


def test_a_bucket_of_the_screen_has_the_config_of_either_form(user_file):
    user_file(file('["screened"]', entry=SCREENED))
    assert find("screened", 16, 4096, H200) == HopperScreenConfig(32, 1, 128, 256, 4)
    assert find("screened", 8, 4096, H200) == ScreenConfig(8, 128, 128, 128, True, True, 4, 3, 2)
    # The shipped tables have the other buckets.
    assert find("screened", 64, 4096, H200, (9, 0)) == HopperScreenConfig(64, 1, 128, 256, 3)
    assert isinstance(find("screened", 64, 4096, OTHER, (8, 9)), ScreenConfig)


def test_an_entry_of_neither_form_is_refused(user_file):
    user_file(file('["screened"]', entry="{ bucket = 16, split = 1 }"))
    with pytest.raises(InvalidArgument, match="split"):
        find("screened", 16, 4096, H200)

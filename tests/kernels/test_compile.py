"""The kernels of public calls compile without a GPU, with the registers of the table."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import version

import pytest
from compile_kernels import (
    COMPILED,
    ELSEWHERE,
    OLDEST,
    TABLE,
    TABLED,
    Compiled,
    compile_calls,
    elsewhere,
    read,
    table,
    tabled,
    tritons,
)
from tree import ROOT

# Compiling is slow. tools/compile_kernels.py caches the results for the next run.
pytestmark = pytest.mark.timeout(3600)

INSTALLED = version("triton")
ROWS_OF = read(TABLE)
"""Version of Triton -> rows."""
QUICK = (
    r"^((portable|hopper) B=64 everything|portable B=16 int8|screened B=16|truncated B=64 k = 50)$"
)
"""Calls whose kernels the quick tests compile, once for all of them."""
MORE = (
    r"^(portable B=64 (int8( bias)?|fp8)|hopper B=(64 int8|128 fp8)"
    r"|filters from the screen B=8 (D=1000|everything))$"
)
"""Calls of the tests below whose registers are not in the table."""
ALL = f"{TABLED}|{MORE}"
UNTIMED = r"^(score B=64|screened B=(16|64)|truncated B=64 (k = 50|p)|flash_sampling_store B=16)$"
"""Calls that are compiled for GPUs without tuned tiles, next to those of `elsewhere`."""
UNTUNED = re.compile("everything|D=1000")
"""Calls without tuned tiles. For D = 1000 rows of the int8 copy are not aligned."""
SMALL = {"top_tokens", "rank", "sampling_look", "sampling_cutoff", "sampling_race"}
SMALL |= {"sampling_narrow", "sampling_redraw", "akunu_exact", "akunu_faithful", "pivot_search"}
"""Kernels without a matrix product that keep the candidates of a row in registers."""
WIDE = {
    "3.6.0": {
        "hopper B=160 D=4096": 112,
        "hopper B=192 D=8192": 16,
        "hopper B=192 D=8192 token noise": 56,
        "hopper B=320 D=4096": 8,
    },
    "3.9.0": {
        "flash_sampling_gather B=64 2 ranks": 8,
        "hopper B=160 D=4096": 176,
        "hopper B=192 D=8192": 456,
        "hopper B=192 D=8192 token noise": 608,
        "hopper B=256 logprob": 136,
        "hopper B=320 D=4096": 464,
    },
}
"""Version of Triton -> bytes of stack of the tuned launches that have a stack. Their tiles have 256
tokens, and three warpgroups, extra rows or log-probabilities; or the masses are those of ranks."""


@cache
def compile_once(named: str, triton: str = INSTALLED) -> list[Compiled]:
    """Return the results of the calls by a Triton of `tritons`."""
    return compile_calls(named=named, triton=tritons()[triton])


def compiled_of(kernels: str, named: str) -> list[Compiled]:
    """Return those of ALL whose kernel and one of whose calls match, by the installed Triton."""
    return [
        each
        for each in compile_once(ALL)
        if re.search(kernels, each.kernel)
        and any(re.search(named, launch.split(" #")[0]) for launch in each.launches)
    ]


@pytest.mark.parametrize("triton", ROWS_OF)
def test_every_kernel_is_in_the_table(triton):
    """A new kernel is launched by its sampler, or by a call in tools/kernel_calls.py."""
    named = set()
    for folder in ("kernels", "baselines"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"jit(?:\(.*\))?\ndef _?(\w+)_kernel\(", path.read_text()))
    assert {"flash_sampling", "hopper", "sampling_race", "weight_stream"} <= named
    kernels = {row["kernel"] for row in ROWS_OF[triton]}
    assert named == kernels, "run python tools/compile_kernels.py"


def test_the_table_has_the_oldest_supported_triton():
    """make installs it for the tests; the requirement of the package begins with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = (each for each in project["dependencies"] if each.startswith("triton"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert OLDEST in ROWS_OF
    assert f">={OLDEST.removesuffix('.0')}," in required
    assert f"\nOLDEST = {OLDEST}\n" in makefile


def test_a_folder_without_triton_is_named(tmp_path):
    """Otherwise the process would compile by the installed one."""
    with pytest.raises(RuntimeError, match=r"nowhere: expected a Triton; `make oldest-triton`"):
        compile_calls(triton=tmp_path / "nowhere")


@pytest.mark.parametrize("triton", ROWS_OF)
def test_tuned_launches_keep_everything_in_registers(triton):
    """Tiles of 256 columns have 160 or 168 registers per thread; sums take 128 of them."""
    stack = {
        row["launch"]: int(row["stack"])
        for row in ROWS_OF[triton]
        if int(row["stack"]) and row["kernel"] not in SMALL and not UNTUNED.search(row["launch"])
    }
    assert stack == WIDE[triton]


@pytest.mark.parametrize(
    ("triton", "named"),
    [
        (INSTALLED, QUICK),
        pytest.param(INSTALLED, ALL, marks=pytest.mark.full),
        pytest.param(OLDEST, tabled(OLDEST), marks=pytest.mark.full),
    ],
)
def test_launches_compile_to_what_the_table_says(triton, named):
    """Registers, stack, spills and shared memory; `python tools/compile_kernels.py` writes it."""
    if triton not in ROWS_OF:
        pytest.skip(f"the table has no rows of Triton {triton}")
    results, expected = (
        [
            row
            for row in rows
            if all(re.search(each, row["launch"].split(" #")[0]) for each in (named, TABLED))
        ]
        for rows in (table(compile_once(named, triton)), ROWS_OF[triton])
    )
    assert results == expected


@pytest.mark.parametrize("named", [QUICK, pytest.param(ALL, marks=pytest.mark.full)])
def test_every_launch_names_enable_fp_fusion(named):
    """They compile with the default off, as in Triton 3.10 (see launch/test_fp_fusion.py)."""
    unnamed = {
        each.kernel: each.launches
        for each in compile_once(named)
        if not each.constants["enable_fp_fusion"]
    }
    assert not unnamed


@pytest.mark.full
def test_the_portable_kernel_compiles_for_other_gpus_as_the_page_says():
    """The smallest and the largest tile of each GPU."""
    results = elsewhere(r"^portable B=(16|256) plain$")
    assert {row["gpu"] for row in results} == set(ELSEWHERE)
    # 0 by Triton 3.9; by 3.6, 8 on sm_120.
    assert all(int(row["stack"]) <= 8 for row in results)
    for triton, page in read(COMPILED).items():
        assert triton != INSTALLED or all(row in page for row in results)


@pytest.mark.full
@pytest.mark.parametrize("architecture", ["sm_80", "sm_100"])
def test_launches_compile_for_gpus_without_tuned_tiles(architecture):
    """A few words on the stack are acceptable, a thread's accumulator of 256 bytes is not."""
    results = compile_calls(architecture=architecture, named=UNTIMED)
    assert len(results) > 8
    plain = [each for each in results if not UNTUNED.search(" ".join(each.launches))]
    # The portable screen of 64 rows spills on sm_80 under Triton 3.9, for an unknown reason.
    plain = [each for each in plain if (each.kernel, architecture) != ("screen", "sm_80")]
    assert not {each.kernel: each.launches for each in plain if each.stack > 255}


@pytest.mark.full
def test_single_logits_are_loaded_ahead_and_not_one_number_at_a_time():
    """Triton 3.8 and later forget an alignment in tl.where, and then load 16 bits at a time."""
    kernels = {"resolve", "filter_resolve", "filter_leaders"}
    results = compiled_of(f"^({'|'.join(kernels)})$", "^(screened B=16|filters from.*)$")
    assert {compiled.kernel for compiled in results} == kernels
    for compiled in (each for each in results if not UNTUNED.search(" ".join(each.launches))):
        assert "cp.async" in compiled.ptx, compiled.launches
        assert not re.search(r"ld\.global\S*\.[bu]16", compiled.ptx), compiled.launches


PRODUCT = re.compile(r"(?:mul|div\.full)\.f32\s+(%\w+),")
SUM = re.compile(r"(?:add|sub)\.f32\s+%\w+, (%?\w+), (%?\w+);")


@pytest.mark.parametrize("kernel", ["portable", "hopper"])
def test_no_sum_of_a_product_is_left_to_the_assembler(kernel):
    """The assembler fuses them in some kernels only, and then rounds once instead of twice."""
    (compiled,) = (
        each
        for each in compile_once(QUICK)
        if each.kernel in ("flash_sampling", "hopper")
        and f"{kernel} B=64 everything" in each.launches
    )
    products: set[str] = set()
    sums = 0
    for line in compiled.ptx.splitlines():
        if matched := SUM.search(line):
            sums += 1
            assert not products & set(matched.groups()), line
        elif matched := PRODUCT.search(line):
            products.add(matched[1])
    assert products and sums


@pytest.mark.full
def test_a_bias_is_added_to_what_a_scale_has_rounded():
    """If the compiler fused the two, the kernel with a bias would have fewer fmas."""
    results = compiled_of("", "^portable B=64 int8( bias)?$")
    plain, biased = (each.ptx.count("fma.rn.f32") for each in results)
    assert plain == biased > 0


@pytest.mark.full
@pytest.mark.parametrize(("triton", "named"), [(INSTALLED, ALL), (OLDEST, tabled(OLDEST))])
def test_what_wide_tiles_spill_stays_out_of_the_loop_over_columns(triton, named):
    results = [
        each
        for each in compile_once(named, triton)
        if each.kernel == "hopper"
        and each.constants["BLOCK_V"] == 256
        and re.search(r"flash_sampling_hopper B=|hopper B=\d+ D=", " ".join(each.launches))
    ]
    assert len(results) >= 2
    for compiled in results:
        # From the wait for a stage to the end of its products.
        code = re.sub(r"SYNCS\.PHASECHK", "LOOP", "\n".join(compiled.instructions))
        loops = re.findall(r"LOOP((?:(?!LOOP).)*HGMMA(?:(?!LOOP).)*)WARPGROUP\.DEPBAR", code, re.S)
        assert len(loops) >= 4, compiled.launches
        assert not [loop for loop in loops if re.search(r"\b(LDL|STL)\b", loop)], compiled.launches


WRITING = re.compile(r"(?:@!?U?P\w+ )?([A-Z]\w*)(\S*) (?:P\w+, )?R(\d+)\b")
NO_RESULT = {"ST", "STS", "STG", "STL", "RED", "SYNCS", "HGMMA", "BRA"}


def written_while_read(code: list[str]) -> list[str]:
    """Return the instructions that write a register which an unfinished product still reads.

    Products finish in groups, which `gsb0` closes. The wait has the number of groups that may
    still run.
    """
    groups: list[set[int]] = []
    reading: set[int] = set()  # registers of the open group
    early = []
    for line in code:
        if product := re.search(r"HGMMA\S+ R\d+, R(\d+), gdesc", line):
            reading |= set(range(int(product[1]), int(product[1]) + 4))
            if "gsb0" in line:
                groups.append(reading)
                reading = set()
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", line):
            groups = groups[max(0, len(groups) - int(wait[1], 16)) :]
        elif (writing := WRITING.match(line)) and writing[1] not in NO_RESULT:
            first, kind = int(writing[3]), writing[2]
            width = 4 if ".128" in kind else 2 if ".64" in kind or ".WIDE" in kind else 1
            if reading.union(*groups) & set(range(first, first + width)):
                early.append(line)
    return early


def test_a_register_that_is_written_too_early_is_found():
    product = "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0"
    another = "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR4], R24, gsb0"
    wait, for_one = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (0, 1))
    writes = ["LDS.U16 R88, [R1]", "@P1 LDS.128 R88, [R1+0x10]", "IMAD.WIDE R90, R1, R2, R3"]
    for early in writes:
        assert written_while_read([product, early, wait]) == [early]
        assert written_while_read([product, for_one, early]) == [early]
        assert not written_while_read([product, wait, early])
    assert not written_while_read([product, another, for_one, "LDS.U16 R88, [R1]"])
    assert written_while_read([product, another, for_one, "LDS.U16 R95, [R1]"])
    assert not written_while_read([product, "STS [R88], R89", "LDS.64 R92, [R1]", wait])


@pytest.mark.parametrize(
    ("kernel", "named", "least"),
    [
        ("flash_sampling", QUICK, 1),
        pytest.param("flash_sampling", ALL, 3, marks=pytest.mark.full),
        pytest.param("hopper", ALL, 3, marks=pytest.mark.full),
    ],
)
def test_no_register_is_written_that_a_matrix_product_still_reads(kernel, named, least):
    """One-byte weights become operands in registers, where the compiler may miss a hazard."""
    results = [
        each
        for each in compile_once(named)
        if each.kernel == kernel and re.search("int8|fp8", each.launches[0])
    ]
    assert len(results) >= least
    for compiled in results:
        code = "\n".join(compiled.instructions)
        from_registers = re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", code)
        assert "HGMMA" in code and not written_while_read(compiled.instructions), compiled.launches
        if kernel == "flash_sampling" and from_registers:
            # The next iteration of its loop may begin while a product runs.
            assert not re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9]", code), compiled.launches

"""Every kernel that is shipped compiles without a GPU, and keeps its accumulators in registers."""

from __future__ import annotations

import csv
import re
from importlib.metadata import version

import pytest
from kernel_compiler import COMPILED, ELSEWHERE, Compiled, compile_variants, elsewhere
from kernel_variants.variant import TUNED
from tree import ROOT

# A slow machine takes its time; what is compiled is kept for the next run.
pytestmark = pytest.mark.timeout(3600)

FAMILIES = {
    *("akunu_exact", "akunu_faithful", "draft_noise", "flash_sampling", "flash_sampling_gather"),
    *("filter_candidates", "filter_leaders", "filter_resolve", "filter_screen"),
    *(
        "follow_drafts",
        "flash_sampling_two_step",
        "group_gumbel_parallel",
        "gumbel_argmax",
        "matmul_form",
    ),
    *("merge_keys", "noise_map", "pack_mask", "pivot_search", "rank", "resolve"),
    *("sampling_cutoff",),
    *("sampling_kept", "sampling_look", "sampling_narrow", "sampling_race", "sampling_redraw"),
    *("sampling_support", "score_slopes", "screen", "standing", "target_logits", "weight_stream"),
}
FOR_HOPPER = {"flash_sampling_hopper", "hopper_screen"}
"""Kernels for compute capability 9.0 only."""
FILTERING = {
    *("akunu_exact", "akunu_faithful", "pivot_search", "sampling_cutoff", "sampling_look"),
    *("sampling_narrow", "sampling_race", "sampling_redraw", "standing"),
}
"""Kernels without an accumulator, in which a program has a row's candidates in registers."""
SCREENED = {"screen", "hopper_screen", "resolve"}
SCREENED |= {"filter_screen", "filter_leaders", "filter_candidates", "filter_resolve"}


def most_stack(compiled: Compiled) -> int | None:
    """Bytes of the stack that a variant may use; None for any number."""
    name, tuned = compiled.name, compiled.capability == 90
    if "everything" in name or "score, " in name:  # nobody has tuned for so much at once
        return None
    if compiled.family in SCREENED:
        # The configs were chosen under triton 3.6. 3.9 keeps parts of the screen on the stack, and
        # of the exact computation nothing. More with more columns than any model has.
        known = tuned and "pointers" not in name and "D=131072" not in name
        of_tile = 16 if name.startswith("b128v") and " group4 " in name else 0  # once for each
        screens = compiled.family.endswith("screen") and not version("triton").startswith("3.6.")
        return (512 if screens else of_tile) if known else None
    # The tuned configs keep everything in registers. Elsewhere some words on the stack, for the
    # addresses of the pointer path, of stored logits and of targets above all, are no tragedy; a
    # thread's accumulator of 256 bytes would be. Triton 3.9 takes at most 16 bytes on sm_80.
    if compiled.family == "flash_sampling_hopper":
        if name.startswith("hopper-g3v256"):
            # Three warpgroups have 160 registers a thread, and the sums of a wide tile take 128.
            # What stays the same for all tiles waits on the stack: 16 bytes of a plain draw under
            # Triton 3.6, 600 with options or under 3.9; but nothing in the loop over columns.
            return 640
        if name.endswith("score with entropy"):
            return 296  # with tiles of 128 columns; nobody has tuned for it
        if name.endswith(" token"):
            return 16  # of two warpgroups; the portable kernel is chosen for token noise
    if re.search(r"^b64\S+ bf16 group (i8|fp8e4nv) bias$", name):
        return 16  # three programs to a multiprocessor have 168 registers a thread
    addresses = "pointers" in name or "stores" in name or "score" in name
    return 0 if tuned and not addresses and compiled.family not in FILTERING else 255


def assert_little_is_spilled(variants: list[Compiled]) -> None:
    spilled = {
        compiled.title: compiled.stack
        for compiled in variants
        if (most := most_stack(compiled)) is not None and compiled.stack > most
    }
    assert not spilled


def test_every_kernel_is_on_the_list_of_variants():
    listed = "".join(path.read_text() for path in (ROOT / "tools/kernel_variants").glob("*.py"))
    named = set()
    for folder in ("kernels", "baselines"):
        for path in (ROOT / folder).rglob("*.py"):
            named |= set(re.findall(r"jit(?:\(.*\))?\ndef _?(\w+)_kernel\(", path.read_text()))
    assert {"flash_sampling", "hopper", "sampling_race", "weight_stream"} <= named
    assert not {name for name in named if not re.search(rf'[".]{name}(_kernel)?"', listed)}


def test_one_variant_of_each_kernel_compiles_and_spills_nothing():
    variants = compile_variants(quick=True)
    assert {compiled.family for compiled in variants} == FAMILIES | FOR_HOPPER
    assert_little_is_spilled(variants)


@pytest.mark.full
def test_the_portable_kernel_compiles_for_other_gpus_as_the_page_says():
    with COMPILED.open(newline="") as file:
        page = list(csv.DictReader(file))
    found = elsewhere()
    assert {row["gpu"] for row in found} == set(ELSEWHERE)
    # 0 by Triton 3.9; by 3.6, 8 on sm_120.
    assert all(int(row["stack"]) <= 8 for row in found)
    if {row["triton"] for row in page} == {version("triton")}:
        assert [{"triton": version("triton"), **row} for row in found] == page


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_variant_compiles_and_keeps_its_accumulators_in_registers(capability):
    """Every config, and every option once; tools/compare_kernels.py compiles more of them."""
    variants = compile_variants(capability=capability, brief=True)
    families = {80: FAMILIES, 90: FAMILIES | FOR_HOPPER, 100: FAMILIES}
    assert {compiled.family for compiled in variants} == families[capability]
    assert_little_is_spilled(variants)


@pytest.mark.full
def test_leaders_and_candidates_are_computed_by_one_instruction():
    """Filters from the screen hold logits of one kernel against those of another."""
    found = compile_variants(
        families=["filter_leaders", "filter_resolve"], capability=TUNED, instructions=True
    )
    assert len(found) > 8
    for compiled in found:
        kinds = {line.split()[0] for line in compiled.instructions if "MMA" in line}
        assert kinds and all(kind.startswith("HGMMA.64x") for kind in kinds), compiled.title


def test_single_logits_are_loaded_ahead_and_not_one_number_at_a_time():
    """Triton 3.8 and later forget an alignment in tl.where, and then load 16 bits at a time."""
    families = ["resolve", "filter_resolve", "filter_leaders", "target_logits"]
    found = compile_variants(families=families, capability=90, quick=True, ptx=True)
    assert {compiled.family for compiled in found} == set(families)
    for compiled in found:
        loads = "\n".join(compiled.instructions)
        assert "cp.async" in loads, compiled.title
        assert not re.search(r"ld\.global\S*\.[bu]16", loads), compiled.title


PRODUCT = re.compile(r"(?:mul|div\.full)\.f32\s+(%\w+),")
SUM = re.compile(r"(?:add|sub)\.f32\s+%\w+, (%?\w+), (%?\w+);")


@pytest.mark.parametrize("family", ["flash_sampling", "flash_sampling_hopper"])
def test_no_sum_of_a_product_is_left_to_the_assembler(family):
    """It would round once in one kernel, where it fuses them, and twice in another."""
    named = r"(b64v128d128s32Nfw8p4x1|g1v128d128p4) bf16 group everything, n = 1"
    (compiled,) = compile_variants(families=[family], capability=90, named=named, ptx=True)
    products: set[str] = set()
    sums = 0
    for line in compiled.instructions:
        if found := SUM.search(line):
            sums += 1
            assert not products & set(found.groups()), line
        elif found := PRODUCT.search(line):
            products.add(found[1])
    assert products and sums


def test_a_bias_is_added_to_what_a_scale_has_rounded():
    """Where the compiler fuses the two, it counts fewer fmas of the same kernel with a bias."""
    named = r"^b64v128\S+M\S+ bf16 group i8( bias)?$"
    found = compile_variants(families=["flash_sampling"], capability=90, named=named, ptx=True)
    plain, biased = (sum("fma.rn.f32" in line for line in each.instructions) for each in found)
    assert plain == biased > 0


@pytest.mark.full
def test_what_three_warpgroups_spill_stays_out_of_the_loop_over_columns():
    named = r"^hopper-g3v256\S+ bf16 group( temperatures)?$"
    found = compile_variants(
        families=["flash_sampling_hopper"], capability=90, named=named, instructions=True
    )
    assert len(found) == 5
    for compiled in found:
        # From where a stage is waited for to where its products are there.
        code = re.sub(r"SYNCS\.PHASECHK", "LOOP", "\n".join(compiled.instructions))
        loops = re.findall(r"LOOP((?:(?!LOOP).)*HGMMA(?:(?!LOOP).)*)WARPGROUP\.DEPBAR", code, re.S)
        assert len(loops) >= 6, compiled.title
        assert not [loop for loop in loops if re.search(r"\b(LDL|STL)\b", loop)], compiled.title


WRITING = re.compile(r"(?:@!?U?P\w+ )?([A-Z]\w*)(\S*) (?:P\w+, )?R(\d+)\b")
NO_RESULT = {"ST", "STS", "STG", "STL", "RED", "SYNCS", "HGMMA", "BRA"}


def written_while_read(code: list[str]) -> list[str]:
    """Instructions that write a register which a product before them reads and has not ended.

    Products end in groups, which `gsb0` closes; the wait names how many of the last may go on.
    """
    groups: list[set[int]] = []
    reading: set[int] = set()  # of the group that is not closed
    found = []
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
                found.append(line)
    return found


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
    ("family", "named", "least"),
    [
        ("flash_sampling", r"^b\d+v\d+d\d+\S+ bf16 group (i8|fp8e4nv)$", 12),
        ("flash_sampling_hopper", r"b bf16 group .*(i8|fp8e4nv)$", 10),
    ],
)
def test_no_register_is_written_that_a_matrix_product_still_reads(family, named, least):
    """Weights of one byte become operands in registers, where the compiler may see no hazard."""
    found = compile_variants(families=[family], capability=90, named=named, instructions=True)
    assert len(found) >= least
    for compiled in found:
        code = "\n".join(compiled.instructions)
        from_registers = re.search(r"HGMMA\S+ R\d+, R\d+, gdesc", code)
        assert "HGMMA" in code and not written_while_read(compiled.instructions), compiled.title
        if family == "flash_sampling" and from_registers:
            # Its loop may begin anew with a product that runs.
            assert not re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[1-9]", code), compiled.title

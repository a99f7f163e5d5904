"""Kernels by name, as CUPTI gave them on an H200; and the split of a step into parts."""

from __future__ import annotations

import pandas as pd
import pytest
from cells import cell
from tree import newest

from fsbench.records import breakdown
from fsbench.records.breakdown import Part, Split, kernel_rows, part_of, split
from fsbench.records.cell import CellRecord, Round
from fsbench.records.lines import read_lines

POINTS = newest("paper") / "points.jsonl.gz"

CELL = cell(fused=False)

# Recorded with CUPTI on H200s, cut as fsbench cuts them; but for those of other GPUs and CUTLASS.
NAMES = {
    Part.MATMUL: [
        "truncated_matmul_kernel",
        "nvjet_sm90_tst_384x8_64x4_2x1_v_bz_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_...",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "_ZN7cutlass7Kernel2I59cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_64...01234567",
        "_ZN8cublasLt19splitKreduce_kernelILi32ELi16EiffffLb1ELb0ELb0EEEv18cublasSpl...01234567",
        "_ZN17gemv2T_kernel_valIiiffffLi128ELi16ELi4ELi4ELb0ELb0E16cublasGemvParamsE",
        "triton_tem_fused_mm_t_0",
    ],
    Part.SAMPLING: [
        "_ZN10flashinfer8sampling24SamplingFromLogitsKernelILj1024ELN3cub17CUB...5fed2355",
        "_ZN10flashinfer8sampling19OnlineSoftmaxFusedKernelILj1024EfEEvPT0_S3_P...01234567",
        "_ZN2at6native43_GLOBAL__N__b6de9c8c_10_SoftMax_cu_9f978f6319cunn_Soft...ce26c015",
        "_ZN2at6native65_GLOBAL__N__28278f10_32_DistributionExponentialKernel_...8109929c",
        "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfNS0_9ArgMaxOpsI...b413a246",
        "_ZN2at6native25_assert_async_cuda_kernelIbEEvPKT_NS0_3MsgE",
        "triton_poi_fused_div_0",
        "triton_red_fused__to_copy_amax_mul_0",
        "triton_per_fused__softmax_div_sub_4",
        "_gumbel_argmax_kernel",
        "sampling_sections_kernel",
    ],
    Part.OTHER: ["memcpy", "memset"],
    Part.UNKNOWN: ["_weight_stream_kernel", "my_kernel", "memset_of_mine", ""],
}


@pytest.mark.parametrize(
    ("part", "name"), [(part, name) for part, names in NAMES.items() for name in names]
)
def test_the_purpose_of_a_kernel_follows_from_its_name(part, name):
    assert part_of(name) is part


def test_every_kernel_of_the_committed_runs_is_known():
    """But for those of our fused samplers, whose names are not asked: they have one each."""
    seen: dict[bool, set[str]] = {True: set(), False: set()}
    for line in read_lines(POINTS):
        point = line.value
        if point["cell"]["kind"] == "exact":
            kernels = set(point.get("measured", {}).get("kernels", ()))
            fused = point["cell"]["fused"] and point["cell"]["provider"] != "flashsampling_authors"
            assert len(kernels) <= 1 or not fused
            seen[fused] |= kernels
    assert len(seen[False]) > 30 and len(seen[True]) == 3  # two samplers, one form of them
    assert {name for name in seen[False] if part_of(name) is Part.UNKNOWN} == set()


def a_round(span: int = 2, total: float = 0.0, **kernels: float) -> Round:
    return Round([1.0] * span, sum_us=[total] * span, n_kernels=len(kernels), kernels=kernels)


def test_by_names_over_rounds_of_different_lengths():
    rounds = {
        0: a_round(span=1, nvjet_a=100.0, triton_poi_fused_div_0=8.0, memset=2.0, mine=1.0),
        1: a_round(span=3, nvjet_a=104.0, triton_poi_fused_div_0=4.0, memset=2.0),
    }
    assert split(CellRecord(CELL, rounds)) == Split(103.0, 5.0, 2.25, "names")


def test_a_fused_sampler_by_difference_to_the_form_with_least_in_it():
    fused = cell()
    forms = {"greedy": {0: a_round(total=90.0, k=90.0)}}
    record = CellRecord(fused, {0: a_round(total=100.0, k=101.0)}, forms=forms)
    assert split(record) == Split(90.0, 10.0, 0.0, "greedy")
    forms["matmul"] = {0: a_round(total=103.0, k=103.0)}
    assert split(record) == Split(103.0, -3.0, 0.0, "matmul")  # noise is not hidden


def test_the_only_kernel_of_a_fused_sampler_is_no_matmul():
    record = CellRecord(cell(), {0: a_round(total=9.0, gemm=8.0, memset=1.0)})
    assert split(record) is None
    assert kernel_rows([record])["part"].tolist() == ["fused", "other"]
    assert split(CellRecord(CELL, record.rounds)) == Split(8.0, 0.0, 1.0, "names")


def test_a_fused_sampler_of_several_kernels_is_split_by_their_names():
    record = CellRecord(cell(), {0: a_round(nvjet=9.0, argmax=1.0)})
    assert split(record) == Split(9.0, 1.0, 0.0, "names")


@pytest.mark.parametrize(
    "record",
    [
        CellRecord(CELL),
        CellRecord(CELL, {0: Round([1.0])}),  # a timer that sees no kernels
        CellRecord(CELL, {0: a_round(total=9.0, flash_sample_and_store=9.0)}),
        CellRecord(cell(), {0: a_round(total=9.0, flash_sampling=9.0)}),
    ],
)
def test_unknown_kernels_are_not_split(record):
    assert split(record) is None


def test_breakdown_csv(tmp_path):
    fused = cell(provider="fused")
    records = [
        CellRecord(CELL, {0: a_round(nvjet=30.0, softmax=8.0, mine=2.0)}),
        CellRecord(
            fused, {0: a_round(total=10.0, flash_sample=9.0, memset=1.0)},
            forms={"greedy": {0: a_round(total=5.0, flash_sample=5.0)}},
        ),
        CellRecord(cell(provider="store", fused=False), {0: a_round(sample_and_store=4.0)}),
    ]  # fmt: skip
    path = breakdown.export_csv(tmp_path, records)
    table = pd.read_csv(path, keep_default_na=False)
    shown = table[["provider", "form", "kernel", "part", "mean_us", "share"]]
    assert shown.to_numpy().tolist() == [
        ["fast", "", "nvjet", "matmul", 30.0, 0.75],
        ["fast", "", "softmax", "sampling", 8.0, 0.2],
        ["fast", "", "mine", "unknown", 2.0, 0.05],
        ["fused", "", "flash_sample", "fused", 9.0, 0.9],
        ["fused", "", "memset", "other", 1.0, 0.1],
        ["fused", "greedy", "flash_sample", "fused", 5.0, 1.0],
        ["store", "", "sample_and_store", "unknown", 4.0, 1.0],
    ]
    assert set(table["b"]) == {2} and set(table["l2"]) == {"cold"}


def test_no_kernels_no_file(tmp_path):
    assert breakdown.export_csv(tmp_path, [CellRecord(CELL, {0: Round([1.0])})]) is None
    assert not list(tmp_path.iterdir())
    assert list(kernel_rows([]).columns)[:2] == ["provider", "timer"]

"""The I/O cost model against numbers worked out by hand and against the paper's tables."""

from dataclasses import replace

import pandas as pd
import pytest
from tree import RESULTS

from fsbench.errors import InvalidArgument
from fsbench.problem import Problem
from fsbench.records import iomodel


def test_bytes_and_flops_by_hand():
    # W 7*5 = 35, H 5*3 = 15, logits 7*3 = 21 written and read, 3 tokens; 2 bytes each.
    work = iomodel.traffic(Problem(3, 5, 7, "bf16"))
    assert work.fused_bytes == 2 * (35 + 15 + 3) == 106
    assert work.baseline_bytes == 2 * (35 + 15 + 2 * 21 + 3) == 190
    assert work.flops == 2 * 3 * 5 * 7 == 210
    single = iomodel.traffic(Problem(3, 5, 7, "fp32"))
    assert (single.fused_bytes, single.baseline_bytes, single.flops) == (212, 380, 210)


@pytest.mark.parametrize("B, D, V", [(1, 4096, 151936), (256, 8192, 128256), (3, 5, 7), (1, 1, 1)])
def test_the_predicted_speedup_is_the_papers_formula(B, D, V):
    formula = 1 + 2 / (D / B + D / V + 1 / V)
    assert iomodel.predicted_speedup(Problem(B, D, V)) == pytest.approx(formula, rel=1e-14)


def test_tensor_parallel_counts_one_rank():
    # ceil(7 / 2) = 4 rows of W on the larger shard.
    assert iomodel.traffic(Problem(3, 5, 7, tp=2)) == iomodel.traffic(Problem(3, 5, 4))
    assert iomodel.predicted_speedup(Problem(3, 5, 7, tp=2)) == iomodel.predicted_speedup(
        Problem(3, 5, 4)
    )


@pytest.mark.parametrize(
    "B, D, percent",
    [(1, 8192, 0.02), (16, 8192, 0.39), (256, 8192, 6.25), (64, 4096, 3.13), (256, 4096, 12.5)],
)
def test_approximation_is_table_9_of_the_paper(B, D, percent):
    speedup = iomodel.approximate_speedup(Problem(B, D, 128256))
    assert 100 * (speedup - 1) == pytest.approx(percent, abs=0.0051)


def test_floor_is_bandwidth_at_small_batches_and_compute_at_large_ones():
    small = Problem(1, 4096, 151936)
    by_hand = 2 * (151936 * 4096 + 4096 + 1) / 4.8e12 * 1e6
    assert iomodel.floor_us(small, "NVIDIA H200") == pytest.approx(by_hand)
    assert by_hand == pytest.approx(259.3, abs=0.05)
    large = Problem(1024, 4096, 151936)
    by_rate = 2 * 1024 * 4096 * 151936 / 989e12 * 1e6
    assert iomodel.floor_us(large, "h200") == pytest.approx(by_rate)
    quantized = replace(large, weights="fp8")  # torch's scaled matmul has operands of 8 bits
    assert iomodel.floor_us(quantized, "h200") == pytest.approx(by_rate / 2)


@pytest.mark.parametrize("name", ["", "NVIDIA H100 PCIe", "Radeon"])
def test_no_floor_without_known_peaks(name):
    assert iomodel.floor_us(Problem(1, 64, 128), name) is None


@pytest.mark.parametrize(
    "name, slug",
    [
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
    ],
)
def test_device_names_find_their_gpu(name, slug):
    assert iomodel.gpu(name).slug == slug
    assert iomodel.gpu_slug(name) == slug


@pytest.mark.parametrize(
    "name, slug",
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g-18gb"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA GeForce RTX 3090 Ti", "geforce-rtx-3090-ti"),
        ("../../etc/x", "etc-x"),
        ("", ""),
    ],
)
def test_variants_with_other_peaks_are_unknown_and_named_safely(name, slug):
    assert iomodel.find_gpu(name) is None
    assert iomodel.gpu_slug(name) == slug


def test_unknown_gpu_names_the_nearest():
    with pytest.raises(InvalidArgument, match=r"gpu: .* got 'h201'; did you mean 'h200'\?"):
        iomodel.gpu("h201")


def test_peaks_are_table_3_of_the_paper():
    table = {"h100": (3.35, 989), "h200": (4.8, 989), "b200": (8.0, 2250), "b300": (8.0, 2250)}
    for slug, peaks in table.items():
        roof = iomodel.gpu(slug).datasheet
        assert (roof.tb_per_s, roof.tflops) == peaks
    ops_per_byte = {slug: round(flops / tb) for slug, (tb, flops) in table.items()}
    assert ops_per_byte == {"h100": 295, "h200": 206, "b200": 281, "b300": 281}


def test_every_gpu_is_found_by_its_slug():
    for slug, gpu in iomodel.gpus().items():
        assert iomodel.find_gpu(slug) is gpu
        assert gpu.datasheet.tb_per_s > 0
        assert gpu.datasheet.tflops > 0


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_a_measured_roof_is_the_highest_committed(gpu):
    """A point of the results cannot lie above the measured roof."""
    result = pd.concat(pd.read_csv(path) for path in (RESULTS / gpu).rglob("results.csv"))
    # For other distributions the chip needs less power, and a matmul is up to 5 % faster.
    result = result[result.logits.str.startswith("normal")]
    highest = result.groupby("provider")[["gb_per_s", "tflops"]].max()
    measured = iomodel.gpu(gpu).measured
    assert measured.tb_per_s == round(highest.gb_per_s["weight_stream"] / 1e3, 2)
    assert measured.tflops == round(highest.tflops["matmul_only"])

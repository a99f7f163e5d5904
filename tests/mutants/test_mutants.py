"""The battery rejects every planted bug, by its public entry, and accepts the honest twins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fsbench.provider import Provider
from fsbench.verify import verify
from fsbench.verify.check import Check, Setting

sys.path.append(str(Path(__file__).parent))
import samplers
from samplers import contract, planted

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32")


def first_failure(provider: Provider, tier: str = "ci", only=()) -> Check | None:
    for check in verify(provider, SETTING, tier, only):
        assert check.detail
        if not check.passed:
            return check
    return None


HONEST = {
    "whole": planted(greedy=True),
    "by tile": planted(samplers.by_tile),
    "inverse CDF": planted(draw=samplers.inverse_cdf),
    "group noise": contract("group"),
}

MUTANTS = {
    "noise sign flipped": (planted(draw=samplers.sign_flipped), "fit"),
    "temperature ignored": (planted(draw=samplers.temperature_ignored), None),
    "all rows share noise": (planted(samplers.shared_by_rows), "fit"),
    "all tiles share noise": (planted(samplers.every_tile_alike), "fit"),
    "noise keyed by tile number, tiles by batch": (
        planted(samplers.tile_of_the_batch_size, batch_invariant=True),
        "invariance",
    ),
    "rank term missing": (planted(samplers.rank_missing), "fit"),
    "key + 100 x tile": (planted(samplers.tile_times_100_added_to_seed), "seeds"),
    "seed + step": (planted(samplers.step_added_to_seed), "seeds"),
    "seed ignored": (planted(samplers.seed_ignored), "fit of seeds"),
    "seed cut to 32 bits": (planted(samplers.seed_cut_to_32_bits), "seeds"),
    "step ignored": (planted(samplers.step_ignored), "fit"),
    "fp16 scores": (planted(draw=samplers.fp16_scores), "tiles"),
    "coarse scores, ties to the last": (planted(draw=samplers.ties_to_the_last), "fit"),
    "padding with 0": (planted(draw=samplers.padded_with_zero), "edges"),
    "padding returned": (planted(draw=samplers.padding_returned), "edges"),
    "top-p where none was asked for": (planted(draw=samplers.crossing_token_dropped), None),
    "CDF falls on the last": (planted(draw=samplers.cdf_falls_on_the_last), "fit"),
    "CDF of bf16": (planted(draw=samplers.cdf_of_bf16), None),
    "T = 0 sampled": (planted(draw=samplers.argmax, zero_temperature_sampled=True), "greedy"),
    "offset one ahead": (contract(step=lambda offset: offset + 1), "oracle"),
    "offset cut to 31 bits": (contract(step=lambda offset: offset & 0x7FFFFFFF), "oracle"),
    "greedy rows sampled": (contract(greedy_rows_sampled=True), "filters"),
    "mask ignored": (contract(mask_ignored=True), "filters"),
    "neighbours' masks": (contract(neighbours_mask=True), None),
    "request keyed by its row": (contract(request_keyed_by_row=True), "invariance"),
    "sample added to the seed": (contract(sample_added_to_seed=True), "samples"),
}

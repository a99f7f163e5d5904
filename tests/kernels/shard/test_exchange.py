"""The exchange between ranks as compiled: when a warp may advance the count."""

from __future__ import annotations

import re

import pytest
from compile_kernels import compile_calls
from tree import ROOT

LOAD = re.compile(r"ld\.global\.b32\s+\{ %r\d+ \}, \[ (%rd\d+) \+ 0 \]")
STORE = re.compile(r"st\.global\.b32\s+\[ (%rd\d+) \+ 0 \]")
BARRIER = re.compile(r"bar\.sync\s+0")


def code_before_stores(ptx: list[str]) -> list[str]:
    """Return the code before each store of a number that is loaded at the same address."""
    loads = {match[1] for text in ptx if (match := LOAD.search(text))}
    return [
        "\n".join(ptx[:line])
        for line, text in enumerate(ptx)
        if (match := STORE.search(text)) and match[1] in loads
    ]


@pytest.mark.parametrize("file", ["portable", "hopper/kernel"])
def test_both_kernels_exchange_masses_before_candidates(file):
    """Ranks may run either kernel: with another order both would wait for ever."""
    text = (ROOT / f"kernels/fused/{file}.py").read_text()
    finish = text[text.index("def _finish(") :]
    assert 0 < finish.index("= mass_of_ranks(") < finish.index("= best_of_ranks(")


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_no_warp_advances_a_count_that_another_may_still_load():
    """A warp that loaded the next count would wait for words that no rank sends."""
    exchanges = {
        ("flash_sampling", "portable B=64 logz, 2 ranks"): 4,
        ("hopper", "hopper B=64 logz, 2 ranks"): 4,
        ("exchange", "flash_sampling_two_step B=64 2 ranks"): 1,
        ("resolve", "flash_sampling_screened B=64 2 ranks"): 1,
    }
    named, calls = map("|".join, zip(*exchanges, strict=True))
    kernels = compile_calls(kernels=f"^({named})$", named=f"^({calls})$")
    numbers = {(each.kernel, each.launches[0].split(" #")[0]): each for each in kernels}
    assert exchanges.keys() <= numbers.keys()
    for key, expected in exchanges.items():
        each = numbers[key]
        parts = code_before_stores(each.ptx.splitlines())
        # screened.leaders stores the length of a list that it shortened; warps meet in between.
        shortened = int(each.kernel == "resolve")
        assert len(parts) == shortened + expected, each.launches
        for code in parts[shortened:]:
            # After the last loop, which waits for the words of other ranks.
            assert BARRIER.search(code.rsplit("$L__BB", 1)[-1]), each.launches

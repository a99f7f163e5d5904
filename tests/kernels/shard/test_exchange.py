"""The exchange between ranks as it is compiled: when a warp may count on."""

from __future__ import annotations

import re

import pytest
from compile_kernels import compile_calls
from tree import ROOT

LOAD = re.compile(r"ld\.global\.b32\s+\{ %r\d+ \}, \[ (%rd\d+) \+ 0 \]")
STORE = re.compile(r"st\.global\.b32\s+\[ (%rd\d+) \+ 0 \]")
BARRIER = re.compile(r"bar\.sync\s+0")


def counted(ptx: list[str]) -> list[str]:
    """What stands before the store of a count, of every exchange of a kernel.

    A count is the only number that is loaded and stored at one address.
    """
    loaded = {found[1] for text in ptx if (found := LOAD.search(text))}
    return [
        "\n".join(ptx[:line])
        for line, text in enumerate(ptx)
        if (found := STORE.search(text)) and found[1] in loaded
    ]


@pytest.mark.parametrize("file", ["portable", "hopper/kernel"])
def test_both_kernels_exchange_masses_before_candidates(file):
    """Ranks may run either. Each waits for what the other sends next, or both wait for ever."""
    text = (ROOT / f"kernels/fused/{file}.py").read_text()
    finish = text[text.index("def _finish(") :]
    assert 0 < finish.index("= mass_of_ranks(") < finish.index("= best_of_ranks(")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kernel", "call", "exchanges"),
    [
        ("flash_sampling", "portable B=64 logz, 2 ranks", 4),
        ("hopper", "hopper B=64 logz, 2 ranks", 4),
        ("exchange", "flash_sampling_two_step B=64 2 ranks", 1),
        ("resolve", "flash_sampling_screened B=64 2 ranks", 1),
    ],
)
def test_no_warp_counts_on_while_another_may_still_load_the_count(kernel, call, exchanges):
    """A warp that loaded the next count would wait for words that nobody sends."""
    found = compile_calls(kernels=f"^{kernel}$", named=f"^{call}$")
    assert found
    for each in found:
        between = counted(each.ptx.splitlines())
        assert len(between) == exchanges, each.launches
        for code in between:
            # Behind the last loop, the wait for the others' words.
            assert BARRIER.search(code.rsplit("$L__BB", 1)[-1]), each.launches

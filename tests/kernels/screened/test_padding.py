"""Tokens from V on are never drawn, and memory around the tensors is never read or written.

In rows whose scores have no bound (an undefined or huge hidden state, an invalid temperature) every
token passes the screen, also a tile's padding, which must not be listed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from memory_watch import within_tensors
from tiers import full
from torch import Tensor
from triton.runtime.errors import InterpreterError

from fsbench.kernels import flash_sample
from fsbench.kernels.configs.screen_choice import default_configs
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import ScreenedHead, prepare_head
from fsbench.kernels.screened.records import lanes_below, lanes_inside

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.interpreter]

SCREEN, RESOLVE = default_configs(4, 64, torch.device("cpu"))
ROOMY = (replace(SCREEN, room=64, row_room=4096), RESOLVE)
"""Configs with lists as on a GPU: small vocabularies fit."""


def amid(inner: Tensor, around: float, room: int = 4096) -> Tensor:
    """A copy of `inner` in the middle of a tensor full of `around`."""
    whole = torch.full((inner.numel() + 2 * room,), around).to(inner.dtype)
    whole[room : room + inner.numel()] = inner.flatten()
    return whole[room : room + inner.numel()].view(inner.shape)


def matrices(V: int, rows: int, D: int = 64) -> tuple[Tensor, ScreenedHead]:
    """Return hidden, and a head whose tokens from V on, and memory around it, would win.

    Sums are exact in fp32: how a CPU's matmul rounds depends on its shape.
    """
    draw = torch.Generator().manual_seed(V)
    hidden = (4 * torch.randn(4, D, generator=draw)).round() / 8
    weight = (8 * torch.randn(rows, D, generator=draw)).round() / 16
    weight[V:] = 64 * hidden[2].sign()
    head = prepare_head(weight)
    parts = (amid(head.weight, 2.0**20), amid(head.codes, 127), amid(head.scale, 2.0**20))
    return hidden, ScreenedHead(*parts, *(amid(part, torch.nan) for part in head.copy[2:]))


@pytest.mark.parametrize(
    ("part", "value", "T", "V", "rows"),
    [
        (slice(None), 2.0**51, 1.0, 100, 100),
        (slice(1), torch.nan, 1.0, 100, 100),
        (slice(0), None, 2.0**110, 100, 100),
        full(slice(1), 2.0**51, 1.0, 500, 560),
        full(slice(None), torch.inf, 1.0, 700, 700),
        full(slice(0), None, torch.nan, 100, 100),
        full(slice(0), None, -1.0, 100, 100),
    ],
    ids=str,
)
def test_rows_without_bounds_draw_no_padding(part, value, T, V, rows):
    hidden, head = matrices(V, rows)
    if value is not None:
        hidden[2, part] = value
    temperature = torch.tensor([1.0, 0.5, T, 0.0])
    hidden, temperature = amid(hidden, torch.nan), amid(temperature, torch.nan)
    options = {"seed": torch.tensor([5]), "temperature": temperature, "vocab_size": V}
    with within_tensors() as launches:
        sample = screened_sample(hidden, head, configs=ROOMY, **options)
    assert len(launches) == 2
    same = flash_sample(hidden, head.weight, noise="token", **options)
    assert sample.tokens.tolist() == same.tokens.tolist()
    assert sample.valid.tolist() == same.valid.tolist()
    assert sample.found is not None and sample.found[2] == V  # all of them, from the list


def bits_of(value: int, V: int) -> Tensor:
    return torch.full((4, -(-V // 32)), value, dtype=torch.int32)


OPTIONS = {
    "bias that forbids": {"bias": amid(torch.full((100,), -torch.inf), 1e30)},
    "undefined bias": {"bias": amid(torch.full((4, 100), torch.nan), 1e30)},
    "no bit set": {"mask": amid(bits_of(0, 100), -1)},
    "soft cap": {"soft_cap": 2.0},
    "everything": {
        "bias": amid(torch.linspace(-2, 2, 400).view(4, 100), torch.nan),
        "mask": amid(bits_of(0x55555555, 100), -1),
        "soft_cap": 5.0,
        "seed": amid(torch.tensor([5, 6, 7, 8]), 1),
        "offset": amid(torch.tensor([1, 2, 3, 4]), 1),
    },
}


@pytest.mark.parametrize(
    ("name", "configs", "D"),
    [
        ("everything", ROOMY, 30),
        ("everything", None, 64),
        full("soft cap", None, 64),
        *(full(name, ROOMY, 64) for name in OPTIONS),
    ],
)
def test_options_touch_nothing_else_in_rows_without_bounds(name, configs, D):
    hidden, head = matrices(100, 100, D)
    hidden[1], hidden[2, 3] = torch.nan, 2.0**51
    temperature = amid(torch.tensor([1.0, 0.5, 1.0, -1.0]), torch.nan)
    hidden = amid(hidden, torch.nan)
    options = {"seed": torch.tensor([5]), "temperature": temperature, **OPTIONS[name]}
    with within_tensors():
        sample = screened_sample(hidden, head, configs=configs, **options)
    same = flash_sample(hidden, head.weight, noise="token", **options)
    assert sample.tokens.tolist() == same.tokens.tolist()


@triton.jit
def _lanes(lanes_ptr, V, WORDS: tl.constexpr):
    word = tl.arange(0, WORDS)
    lanes = lanes_inside((word << 4) | 15, lanes_below(V), V)
    tl.store(lanes_ptr + word, lanes)


@pytest.mark.parametrize("V", [1, 3, 9, 16, 26, 31, 47, 128])
def test_the_lanes_of_records_are_the_tokens_of_the_vocabulary(V):
    lanes = torch.full((32,), 99, dtype=torch.int32)
    _lanes[(1,)](lanes, V, WORDS=32)
    tokens = [
        word // 4 * 16 + word % 4 * 2 + (0, 1, 8, 9)[lane]
        for word in range(32)
        for lane in range(4)
        if lanes[word] >> lane & 1
    ]
    assert sorted(tokens) == list(range(V)) and lanes.max() <= 15


@triton.jit
def _copy(to_ptr, from_ptr, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < n, other=0.0), mask=i < n)


def test_the_watch_sees_a_read_and_a_write_outside_a_tensor():
    whole = torch.zeros(64)
    with within_tensors() as launches:
        _copy[(1,)](whole[:9], whole[32:41], 9, SIZE=16)
    assert launches == [2]
    for to, source, act in (
        (whole[:9], whole[32:42], "a write"),
        (whole[:10], whole[32:41], "a read"),
    ):
        with within_tensors(), pytest.raises(InterpreterError, match=f"{act} of 1 .* 0 bytes"):
            _copy[(1,)](to, source, 10, SIZE=16)

"""What the decision plane does on this machine's CPU, as tables: lists of rows, times in us.

Logits lie in host memory, more of them than the caches hold, as a GPU's copies leave them. What is
compared takes turns within each round (docs/methodology.md), and every figure is a median over
rounds with its 95 % interval; ratios are medians of ratios within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.stats import beta
from torch import Tensor

from fsbench.records.stats import median_interval
from fsbench.simple.controls import PLAIN, PRODUCTION, Controls
from fsbench.simple.native import NEEDS_TAIL, core
from fsbench.simple.plane import Plane, cores, uniforms
from fsbench.simple.reference import decide, tail
from fsbench.simple.ring import Ring, RingShape
from fsbench.simple.steps import FullV, Offload, Parallel, Shvs
from fsbench.simple.zipf import ZipfText

Row = dict[str, Any]

DESIGNS = ("full-V port", "sequence-parallel", "offloaded", "SHVS")

SEEN = 1024
"""Different tokens that each request has seen where all controls are on."""

MOST_SEEN = 4096

_FILTERS = replace(PRODUCTION, repetition=1.0, presence=0.0, frequency=0.0)

_TORCH_ROWS = 4  # of a step in torch, which takes some 10 ms per row


@dataclass
class Case:
    """Something to be timed: `step` handles `rows` rows. Filled by `interleave`: us per row."""

    name: str
    step: Callable[[], object]
    rows: int
    samples_us: list[float] = field(default_factory=list)

    def summary(self) -> Row:
        row_us = float(np.median(self.samples_us))
        low, high = median_interval(self.samples_us)
        fastest, rounds = min(self.samples_us), len(self.samples_us)
        of_row = {"row_us": row_us, "lo_us": low, "hi_us": high, "min_us": fastest}
        return {**of_row, "rounds": rounds, "rows_per_s": 1e6 / row_us}


def interleave(cases: Iterable[Case], rounds: int, round_s: float = 0.05) -> None:
    """Time the cases in turns; a case's turn lasts at least `round_s` or one step."""
    cases = list(cases)
    for case in cases:
        case.step()
    for _ in range(rounds):
        for case in cases:
            begin, steps = time.perf_counter(), 0
            while not steps or time.perf_counter() - begin < round_s:
                case.step()
                steps += 1
            case.samples_us.append((time.perf_counter() - begin) * 1e6 / steps / case.rows)


def ratio(of: Case, to: Case) -> float:
    """Median over rounds of how many times longer a row takes."""
    return float(np.median(np.array(of.samples_us) / np.array(to.samples_us)))


@dataclass(frozen=True)
class Setup:
    """V, hot tokens, their order, rows of logits [rows, V] in it, and what requests have seen.

    history: MOST_SEEN different tokens, in the order in which a request meets them, of several
    requests; rows share them in turns.
    """

    V: int
    hot: int
    order: Tensor
    logits: Tensor
    history: list[list[int]] = field(default_factory=list)
    rounds: int = 9
    dtype: str = "fp32"

    def design(
        self, kind: type[Offload], samplers: int, controls: Controls = PLAIN, seen: int = SEEN
    ) -> Offload:
        """A design of the C++ core, with the logits in its ring and requests that saw tokens."""
        options: dict[str, Any] = {"dtype": self.dtype, "order": self.order}
        if kind is Shvs:
            options["hot"] = self.hot
        step = kind(len(self.logits), self.V, controls, samplers, **options)
        step.logits.copy_(self.logits)
        if isinstance(step, Shvs):
            step.supply()
        self.begin(step, len(self.logits), seen)
        return step

    def begin(self, step: Any, rows: int, seen: int = SEEN) -> None:
        """Requests that have seen so many tokens, half of them in the prompt."""
        for row in range(rows if step.controls.penalises else 0):
            tokens = self.history[row % len(self.history)][:seen]
            step.begin(row, tokens[: seen // 2], tokens[seen // 2 :])


def histories(text: ZipfText) -> list[list[int]]:
    """A history for each topic of the text; see Setup."""
    out = []
    for document in range(text.topics):
        tokens = text.trace(range(document, document + 1), 16 * MOST_SEEN)[0].tolist()
        out.append(list(dict.fromkeys(tokens))[:MOST_SEEN])
    return out


def _stepping(step: Any) -> Callable[[], object]:
    """Calls of `tokens` with fresh noise each time."""
    seed, offset = torch.tensor([7]), torch.tensor([0])

    def once() -> object:
        offset.add_(1)
        return step.tokens(seed, offset)

    return once


def steps(setup: Setup) -> list[Row]:
    """Rows per second of one sampler in the four designs, without and with all controls."""
    rows = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for label, controls in (("plain", PLAIN), ("production", PRODUCTION)):
            in_torch: list[FullV | Parallel] = [
                FullV(_TORCH_ROWS, setup.V, controls),
                Parallel(_TORCH_ROWS, setup.V, controls, samplers=1),
            ]
            for step in in_torch:
                step.logits.copy_(setup.logits[:_TORCH_ROWS])
                setup.begin(step, _TORCH_ROWS)
            in_core = (setup.design(kind, 1, controls) for kind in (Offload, Shvs))
            cases = [
                Case(name, _stepping(step), len(step.logits))
                for name, step in zip(DESIGNS, (*in_torch, *in_core), strict=True)
            ]
            interleave(cases, setup.rounds)
            for case in cases:
                rows.append(
                    {
                        "controls": label,
                        "design": case.name,
                        **case.summary(),
                        "times_first": ratio(cases[0], case),
                        "times_offloaded": ratio(cases[2], case),
                        "settled": settled(setup, controls) if case.name == "SHVS" else None,
                    }
                )
    finally:
        torch.set_num_threads(threads)
    return rows


def settled(setup: Setup, controls: Controls) -> float:
    """Share of rows that the hot tokens settle, penalties left out.

    Without filters it is the share of uniforms below the hot mass; with them all that the filters
    keep must be hot, which is asked for by giving the samplers nothing else.
    """
    rows, hot, V = len(setup.logits), setup.hot, setup.V
    shape = RingShape(1, rows, V)
    ring = Ring(shape)
    ring.logits.view(-1)[: rows * hot].view(rows, hot).copy_(setup.logits[:, :hot])
    ring.parts["shape"][0] = torch.tensor(shape.hot(hot, hot))
    ring.tail_max[0], ring.tail_sum[0] = tail(setup.logits, hot, controls.temperature)
    for name, value in controls.law.items():
        ring.parts[name].fill_(value)
    uniforms(ring.uniform[0], torch.tensor([13]), torch.tensor([0]))
    core().fsb_rows(ring.pointer(), 0, 0, rows, None)
    return float((ring.tokens[0] != NEEDS_TAIL).double().mean())


def scaling(setup: Setup, samplers: Iterable[int]) -> list[Row]:
    """Rows per second of 1, 2, 4, ... samplers together, whole rows and hot tokens."""
    counts = sorted(set(samplers))
    rows = []
    for name, kind in (("offloaded", Offload), ("SHVS", Shvs)):
        for m in counts:
            # One ring at a time would not be interleaved; several rings of one size are fine.
            rows.append((name, m, setup.design(kind, m)))
    cases = [Case(f"{name} {m}", _stepping(step), step.rows) for name, m, step in rows]
    interleave(cases, setup.rounds)
    one = {name: case for (name, m, _), case in zip(rows, cases, strict=True) if m == counts[0]}
    return [
        {
            "design": name,
            "samplers": m,
            **case.summary(),
            "efficiency": ratio(one[name], case) * counts[0] / m,
        }
        for (name, m, _), case in zip(rows, cases, strict=True)
    ]


def penalties(setup: Setup, seen: Iterable[int] = (0, 64, 512, MOST_SEEN)) -> list[Row]:
    """A whole row's time by how many tokens its request has seen, one sampler."""
    on = Controls(repetition=1.1, presence=0.1, frequency=0.1)
    cases = []
    for count in seen:
        step = setup.design(Offload, 1, on, count)
        cases.append(Case(str(count), _stepping(step), step.rows))
    interleave(cases, setup.rounds)
    return [
        {"seen": int(case.name), **case.summary(), "ratio": ratio(case, cases[0])} for case in cases
    ]


def _through(plane: Plane, B: int) -> Tensor:
    return plane.wait(plane.publish(B), B)


def ring(rounds: int) -> list[Row]:
    """What publishing a step and waiting for it costs beyond the rows' own time, by B.

    Rows of 16 logits: hardly any time of their own. `direct` decides them on the calling thread.
    """
    rows = []
    for B in (1, 16, 256):
        plane = Plane(RingShape(1, B, 16), 1)
        plane.ring.logits.zero_()
        cases = [
            Case("ring", partial(_through, plane, B), 1),
            Case("direct", partial(core().fsb_rows, plane.ring.pointer(), 0, 0, B, None), 1),
        ]
        interleave(cases, rounds, 0.02)
        through, direct = (case.summary()["row_us"] for case in cases)
        rows.append(
            {"b": B, "ring_us": through, "direct_us": direct, "overhead_us": through - direct}
        )
    return rows


def scans(setup: Setup, sizes: Iterable[int], repeats: int) -> tuple[list[Row], np.ndarray]:
    """Time of a row whose hot set of H settles it, and rows per second as they fall, by H.

    One sampler on the calling thread, no ring: this is what T(H) and F(H) describe. Returns the
    rows, and times_us [sizes, repeats] of the first for the fit.
    """
    step = setup.design(Offload, 1)
    view, rows = step.plane.ring, step.rows
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sizes = list(sizes)
    statistics = [_statistics(setup, H) for H in sizes]

    def run(H: int, number: int, settled: bool) -> float:
        """us per row over all rows."""
        largest, mass = statistics[number]
        view.tail_max[0], view.tail_sum[0] = largest, mass
        view.parts["shape"][0] = torch.tensor(step.plane.shape.hot(H))
        view.uniform[0] = 1e-9 if settled else uniform
        begin = time.perf_counter()
        core().fsb_rows(view.pointer(), 0, 0, rows, None)
        return (time.perf_counter() - begin) * 1e6 / rows

    settled = np.empty((len(sizes), repeats))
    drawn = np.empty((len(sizes), repeats))
    for repeat in range(-1, repeats):  # the first round warms up
        for number, H in enumerate(sizes):
            settled[number, repeat] = run(H, number, True)
            drawn[number, repeat] = run(H, number, False)
    hits = [float((_hot_share(setup, H, mass) > uniform).double().mean())
            for H, (_, mass) in zip(sizes, statistics, strict=True)]  # fmt: skip
    full = drawn[[i for i, H in enumerate(sizes) if H == setup.V]].reshape(-1)
    return [
        {
            "h": H,
            "settled_us": float(np.median(settled[number])),
            "row_us": float(np.median(drawn[number])),
            "lo_us": median_interval(drawn[number])[0],
            "hi_us": median_interval(drawn[number])[1],
            "hits": hits[number],
            "times_full": float(np.median(full / drawn[number])) if len(full) else None,
        }
        for number, H in enumerate(sizes)
    ], settled


def _statistics(setup: Setup, H: int) -> tuple[Tensor, Tensor]:
    if H == setup.V:
        none = torch.full((len(setup.logits),), -torch.inf)
        return none, torch.zeros(len(none))
    return tail(setup.logits, H, 1.0)


def _hot_share(setup: Setup, H: int, mass: Tensor) -> Tensor:
    total = setup.logits.double().logsumexp(1)
    return (setup.logits[:, :H].double().logsumexp(1) - total).exp()


def variation(setup: Setup, steps: int, rows: int = 8) -> list[Row]:
    """Distance of SHVS's law from the baseline's at every step, and its running mean (Figure 12).

    Bounded by coupling: both read the same uniform, in the same order of tokens, so the total
    variation distance of their laws is at most the chance that their tokens differ. Empirical
    frequencies would have to be compared otherwise, whose own noise is far above such distances.
    Every step has other rows of logits, each drawn from 32 times. The baseline is the oracle
    in float64.
    """
    out, draws = [], 32
    for label, controls in (("plain", PLAIN), ("production", _FILTERS)):
        step = Shvs(rows, setup.V, controls, 1, hot=setup.hot, order=setup.order)
        seed, differ, drawn = torch.tensor([11]), 0, 0
        back = setup.order.argsort()
        for number in range(steps):
            chosen = (torch.arange(rows) + number * rows) % len(setup.logits)
            step.logits.copy_(setup.logits[chosen])
            step.supply()
            half = torch.full((rows,), 0.5, dtype=torch.float64)
            expected = decide(
                setup.logits[chosen][:, back], half, order=setup.order, **controls.law
            )
            here = 0
            for draw in range(draws):
                tokens = step.tokens(seed, torch.tensor([number * draws + draw]))
                uniform = step.plane.ring.uniform[0]
                here += int((~expected.accepts(tokens, uniform, slack=0)).sum())
            differ, drawn = differ + here, drawn + rows * draws
            out.append(
                {
                    "controls": label,
                    "step": number,
                    "draws": rows * draws,
                    "differ": here,
                    "mean_distance": differ / drawn,
                    # Clopper-Pearson at 95 %.
                    "mean_distance_below": float(beta.ppf(0.95, differ + 1, drawn - differ)),
                }
            )
    return out


def sampler_counts(limit: int | None = None) -> list[int]:
    """1, 2, 4, ... up to the cores at hand, and these."""
    most = cores() if limit is None else limit
    return sorted({2**i for i in range(most.bit_length())} | {most})

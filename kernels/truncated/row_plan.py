"""Device code: the plan of a row, which sampling_look_kernel writes for the launches after it.

A plan has PLAN int64 and NUMBERS fp32 in memory. The modes:

    DONE      the row has its token
    RACE      the cutoff is known
    BY_COUNT  the cutoff is where `target` tokens are reached, in [low, high)
    BY_MASS   the cutoff is where `target` mass is reached
    GATHER    top-k, then top-p, among the tokens gathered from low on
    TESTED    top-p among the tokens from low on, by tests of tokens, without a cutoff (top_p)

BY_COUNT and BY_MASS get the flag FEW once the tokens in [low, high) fit into the room for gathered
tokens. Then the search is over.

Until the mode is DONE, a row's token is the draw from the whole vocabulary, which is final if it is
kept. In a row that is TESTED, it is the token to be tested next.

A row has a mode for each of the numbered launches. `assigned` divides the programs of a launch
among the rows that need it. All programs must read the same modes, so a launch only writes the
modes of later launches.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fsbench import reference
from fsbench.kernels.configs.choice import has_tma
from fsbench.kernels.noise.keys import LOWEST_KEY
from fsbench.kernels.truncated.cutoff import first_key

DONE = tl.constexpr(0)
RACE = tl.constexpr(1)
BY_COUNT = tl.constexpr(2)
BY_MASS = tl.constexpr(3)
GATHER = tl.constexpr(4)
TESTED = tl.constexpr(5)
FEW = tl.constexpr(8)
"""A flag on the two modes of a search: the search is over."""

# int64
PLAN = tl.constexpr(16)
MODE = tl.constexpr(0)  # mode of launch 0; those of the other launches follow
MODES = tl.constexpr(8)
LOW = tl.constexpr(8)  # `ordered`: the target is reached from here on
HIGH = tl.constexpr(9)  # `ordered`: the target is not reached from here on
CUT = tl.constexpr(10)  # the cutoff, a key
BEST = tl.constexpr(11)  # the best candidate so far
ARRIVALS = tl.constexpr(12)  # programs that are done with a launch; 0 between launches
TAKEN = tl.constexpr(13)  # number of gathered tokens
K = tl.constexpr(14)
DRAWN = tl.constexpr(15)  # key of the draw from all tokens; LOWEST_KEY: no draw

REACHED = tl.constexpr(reference.REACHED)

# fp32
NUMBERS = tl.constexpr(8)
TOP = tl.constexpr(0)  # the largest logit
START = tl.constexpr(1)  # the lowest threshold: a number in [low, high)
TARGET = tl.constexpr(2)  # tokens or mass; 0 until it is computed
ABOVE = tl.constexpr(3)  # tokens or mass from `high` on
SHARPNESS = tl.constexpr(4)  # log2(e) / T
P = tl.constexpr(5)  # of mass_wanted; above 1: no top-p
TEMPERATURE = tl.constexpr(6)


@triton.jit
def mass_wanted(p):
    """Return the mass at which top-p stops: fsbench.reference.REACHED times p."""
    return p * REACHED


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the options of a programmatic dependent launch, where the GPU supports it.

    The kernel begins before the last launch ends, and waits on the device (wait_for_launch).
    """
    if device.type == "cuda" and has_tma(device):  # GPUs with TMA support it
        return {"USE_PDL": True, "launch_pdl": True}
    return {"USE_PDL": False}


@triton.jit
def wait_for_launch():
    """Let the next launch begin, and wait until the writes of the last launch are visible."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def set_mode(plan_ptr, mode, launch):
    """Set a row's mode for this launch and all later ones."""
    place = tl.arange(0, MODES)
    tl.store(plan_ptr + MODE + place, tl.zeros((MODES,), tl.int64) + mode, mask=place >= launch)


@triton.jit
def modes_of_rows(plan_ptr, launch, B, ROWS: tl.constexpr):
    """Load the modes of all rows for a launch, int64 [ROWS]; DONE beyond B."""
    row = tl.arange(0, ROWS)
    return tl.load(plan_ptr + row * PLAN + MODE + launch, mask=row < B, other=DONE)


@triton.jit
def assigned(active):
    """Return (this program's row, its index among the row's programs, their number or 0).

    active: int1 [ROWS], which rows the launch is for; there are at least as many programs.
    """
    number = tl.cumsum(active.to(tl.int32), axis=0)
    rows = tl.max(number)
    program = tl.program_id(0)
    place = program % tl.maximum(rows, 1)
    is_own = active & (number == place + 1)
    row = tl.sum(tl.where(is_own, tl.arange(0, active.shape[0]), 0))
    programs = tl.cdiv(tl.num_programs(0) - place, tl.maximum(rows, 1))
    return row, program // tl.maximum(rows, 1), tl.where(rows > 0, programs, 0)


@triton.jit
def store_plan(
    plan_ptr, numbers_ptr, row, mode, low, high, k, drawn, top, start, sharpness, p, T
):  # fmt: skip
    """Write a row's plan; low and high are `ordered`."""
    plan_ptr += row * PLAN
    numbers_ptr += row * NUMBERS
    set_mode(plan_ptr, mode, 0)
    tl.store(plan_ptr + LOW, low.to(tl.int64))
    tl.store(plan_ptr + HIGH, high.to(tl.int64))
    tl.store(plan_ptr + CUT, first_key(low))
    tl.store(plan_ptr + BEST, LOWEST_KEY)
    tl.store(plan_ptr + ARRIVALS, 0)
    tl.store(plan_ptr + TAKEN, 0)
    tl.store(plan_ptr + K, k.to(tl.int64))
    tl.store(plan_ptr + DRAWN, drawn)
    tl.store(numbers_ptr + TOP, top)
    tl.store(numbers_ptr + START, start)
    tl.store(numbers_ptr + TARGET, tl.where(mode == BY_COUNT, k.to(tl.float32), 0.0))
    tl.store(numbers_ptr + ABOVE, 0.0)
    tl.store(numbers_ptr + SHARPNESS, sharpness)
    tl.store(numbers_ptr + P, p)
    tl.store(numbers_ptr + TEMPERATURE, T)


@triton.jit
def last_to_arrive(plan_ptr, programs):
    """Return whether this program is a row's last to arrive, and so sees what the others stored."""
    tl.debug_barrier()
    last = tl.atomic_add(plan_ptr + ARRIVALS, 1) == programs - 1
    if last:
        tl.atomic_xchg(plan_ptr + ARRIVALS, 0)
    return last

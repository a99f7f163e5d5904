"""The masses of rows over all programs of a launch, added up in two steps.

Each program stores the masses of its rows (`mass.store_mass`). One program that adds up those of
all others reads 2 MB at 320 rows and 132 programs, while all other multiprocessors are idle. So
TEAM neighboring programs are a team: the last one to arrive adds up the masses of its team, all
teams at the same time, and the last program of the launch adds up those of the teams. Sums of
masses are exact, so they have the same bits in every order.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.mass import add_masses, mass_of_slots, store_mass

TEAM = tl.constexpr(16)
"""Programs of a team."""


@triton.jit
def arrive_in_team(
    arrivals_ptr, counters_ptr, masses_ptr, team_masses_ptr, program, programs, at_once, row, B,
    mask, BLOCKS: tl.constexpr, PARTS: tl.constexpr, MOMENT: tl.constexpr,
):  # fmt: skip
    """Count the arrival of a program whose masses are stored; add up those of a complete team.

    Args:
        arrivals_ptr: int32, counts teams. counters_ptr: int32 [teams], 0 between calls.
        masses_ptr: int64 [3, PARTS programs, B]; [5, ...] with MOMENT. Part p of a program is in
            slot p programs + program.
        team_masses_ptr: int64 [3, teams, B], out; [5, ...] with MOMENT.
        at_once: int32 [1, W], 0 .. W - 1; W is the number of programs that are added at once.
        row: int32 [R], with `mask`, bool [R]. B: rows of the batch.
        BLOCKS: blocks of rows that arrive in the same team.

    Returns:
        (teams that had arrived before, or -1 if the team is not complete; number of teams).
    """
    teams = tl.cdiv(programs, TEAM)
    team = program // TEAM
    first = team * TEAM
    end = tl.minimum(first + TEAM, programs)
    count = program * 0 - 1
    if tl.atomic_add(counters_ptr + team, 1) == BLOCKS * (end - first) - 1:
        tl.atomic_xchg(counters_ptr + team, 0, sem="relaxed")
        slots = PARTS * programs
        mass = mass_of_slots(masses_ptr, slots, first, end, at_once, row, B, MOMENT)
        for part in tl.static_range(1, PARTS):
            skipped = part * programs
            more = mass_of_slots(
                masses_ptr, slots, skipped + first, skipped + end, at_once, row, B, MOMENT
            )
            mass = add_masses(mass, more)
        store_mass(team_masses_ptr, mass, teams, team, row, B, mask)
        # All threads have stored before one counts; the atomics release and acquire for all.
        tl.debug_barrier()
        count = tl.atomic_add(arrivals_ptr, 1)
    return count, teams

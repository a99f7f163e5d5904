"""Device code by which the ranks of a sharded LM head send each other one word per slot.

A word is 64 bits of which bit 31 is free: a packed candidate (noise.keys.ordered_key), an fp32
number, or an integer of 62 bits. Every rank has a buffer that all ranks can write to
(shard.vocab_shard), with two places for every rank's word of a slot. `send` writes a word to all
ranks, `wait` and `received` take the words of other ranks, and `advance` ends the exchange.

Data and signal are one: a word has a flag in bit 31, which differs from that of the word it
replaces, so no two writes must be ordered. Successive words of a slot alternate between its two
places. Two are enough: a rank writes word c + 2 of a slot, in a later launch, after it received all
words c + 1; a rank sends its word c + 1 in a launch that starts when the one that read words c has
ended. So no word is overwritten before it is read, however far the ranks drift. The count c is on
the device, for each slot, so a replayed CUDA graph continues it.

The lower bounds of a screen (screened.lower_bounds) are in the same buffers, but no rank waits for
them: one place per row, whose word is only raised, and has the row's count in its lower half.
"""

import triton
import triton.language as tl

from fsbench.kernels import shard
from fsbench.kernels.device.mass import add_masses, no_mass

AREAS = tl.constexpr(shard.AREAS)
BOUNDS = tl.constexpr(shard.AREAS - 1)
"""The area of lower bounds. Only its first part is used: one word per row for all ranks."""
PATIENCE = tl.constexpr(600 * 10**9)
"""Nanoseconds that a rank waits for a word before it stops with an error (trap)."""


@triton.jit
def send(word, slot, in_bounds, line, RANKS: tl.constexpr):
    """Write the words of slots to all ranks; return the count of earlier words of each slot.

    Args:
        word: int64; bit 31 is ignored.
        slot: int32, of the same shape.
        in_bounds: bool, of the same shape; False for slots that are not used.
        line: (addresses of the ranks' buffers, counts of this rank, its number, slots per area).
    """
    buffers_ptr, counts_ptr, rank, area = line
    count = tl.load(counts_ptr + slot, mask=in_bounds, other=0)
    word = (word & ~(1 << 31)) | (_flag(count) << 31)
    offset = ((count & 1) * RANKS + rank) * (AREAS * area) + slot
    for k in tl.static_range(RANKS):
        buffer = tl.load(buffers_ptr + k).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(buffer + offset, word, mask=in_bounds, sem="relaxed", scope="sys")
    return count


@triton.jit
def _flag(count):
    """Return the flag of word `count` of a slot: 1, 1, 0, 0, 1, 1, ... A new buffer has 0."""
    return (((count >> 1) & 1) ^ 1).to(tl.int64)


@triton.jit
def wait(count, slot, in_bounds, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """Wait until all ranks' words of slots have arrived.

    Args:
        count: Result of `send`.
        WATCH: Stop with an error after PATIENCE; not in the interpreter, which has no clock.
    """
    began = _now() if WATCH else 0
    while _any(in_bounds & _missing(count, slot, in_bounds, line, RANKS)):
        if WATCH:
            _stop_if_late(began)


@triton.jit
def _missing(count, slot, in_bounds, line, RANKS: tl.constexpr):
    """Return the slots in which a rank's word has not arrived."""
    missing = slot < 0
    for k in tl.static_range(RANKS):
        word = tl.load(_place(k, count, slot, line, RANKS), mask=in_bounds, other=0, volatile=True)
        missing |= ((word >> 31) & 1) != _flag(count)
    return missing


@triton.jit
def received(k, count, slot, in_bounds, line, RANKS: tl.constexpr):
    """Load rank k's words of slots, after `wait`; bit 31 is 0.

    They are loaded again because `wait` checks the word of a row in one of the threads that hold
    the row.
    """
    word = tl.load(_place(k, count, slot, line, RANKS), mask=in_bounds, other=0, volatile=True)
    return word & ~(1 << 31)


@triton.jit
def _place(k, count, slot, line, RANKS: tl.constexpr):
    """Return the addresses in this rank's buffer for rank k's words."""
    buffers_ptr, _, rank, area = line
    buffer = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int64))
    return buffer + ((count & 1) * RANKS + k) * (AREAS * area) + slot


@triton.jit
def bounds_of_rank(k, line):
    """Return the address of rank k's lower bounds of rows, int64 [area]."""
    buffers_ptr, _, _, area = line
    return tl.load(buffers_ptr + k).to(tl.pointer_type(tl.int64)) + BOUNDS * area


@triton.jit
def advance(count, slot, in_bounds, line):
    """Count the words of slots, after all of them have been received."""
    _, counts_ptr, _, _ = line
    # Several warps hold a row and load its count, one stores the next. Without the barrier a late
    # warp would load that one, and wait for words that are sent only after it has ended.
    tl.debug_barrier()
    tl.store(counts_ptr + slot, count + 1, mask=in_bounds)


@triton.jit
def _any(condition):
    """Return whether a condition holds anywhere, the same in every thread of the program."""
    holds = condition.to(tl.int32)
    if len(holds.shape) == 2:
        holds = tl.max(holds, axis=1)
    return tl.max(holds, axis=0) != 0


@triton.jit
def _now():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _stop_if_late(began):
    # A trap ends the process's CUDA context: an error at the host's next call, not a silent hang.
    if _now() - began > PATIENCE:
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def best_of_ranks(key, logits, slot, in_bounds, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """Return the best candidates of all ranks, and their logits.

    Args:
        key: int64, packed candidates of this rank.
        logits: Their fp32 logits in a tuple, or ().
        slot: int32, below `area`.
    """
    logit_slot = slot + line[3]
    count = send(key, slot, in_bounds, line, RANKS)
    logit_count = count
    if len(logits) > 0:
        logit_count = send(_word(logits[0]), logit_slot, in_bounds, line, RANKS)
    wait(count, slot, in_bounds, line, RANKS, WATCH)
    if len(logits) > 0:
        wait(logit_count, logit_slot, in_bounds, line, RANKS, WATCH)
    best = key
    best_logits = logits
    for k in tl.static_range(RANKS):
        candidate = received(k, count, slot, in_bounds, line, RANKS)
        if len(logits) > 0:
            word = received(k, logit_count, logit_slot, in_bounds, line, RANKS)
            best_logits = (tl.where(candidate > best, _number(word), best_logits[0]),)
        best = tl.maximum(best, candidate)
    advance(count, slot, in_bounds, line)
    if len(logits) > 0:
        advance(logit_count, logit_slot, in_bounds, line)
    return best, best_logits


@triton.jit
def mass_of_ranks(mass, row, in_bounds, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """Return the masses of rows over all ranks (device.mass); their bits are those of one rank."""
    words = (_word(mass[0]),)
    for i in tl.static_range(1, len(mass)):
        words += (_spread(mass[i]),)
    counts = ()
    for i in tl.static_range(len(mass)):
        counts += (send(words[i], row + (2 + i) * line[3], in_bounds, line, RANKS),)
    for i in tl.static_range(len(mass)):
        wait(counts[i], row + (2 + i) * line[3], in_bounds, line, RANKS, WATCH)
    total = no_mass((row * 0).to(tl.float32), len(mass) > 3)
    for k in tl.static_range(RANKS):
        words = ()
        for i in tl.static_range(len(mass)):
            words += (received(k, counts[i], row + (2 + i) * line[3], in_bounds, line, RANKS),)
        rank_mass = (_number(words[0]),)
        for i in tl.static_range(1, len(mass)):
            rank_mass += (_gathered(words[i]),)
        total = add_masses(total, rank_mass)
    for i in tl.static_range(len(mass)):
        advance(counts[i], row + (2 + i) * line[3], in_bounds, line)
    return total


@triton.jit
def _word(number):
    """Return an fp32 number as a word."""
    return number.to(tl.int32, bitcast=True).to(tl.int64) << 32


@triton.jit
def _number(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _spread(integer):
    """Return an integer of up to 62 bits as a word."""
    return ((integer >> 31) << 32) | (integer & 0x7FFFFFFF)


@triton.jit
def _gathered(word):
    return ((word >> 32) << 31) | (word & 0x7FFFFFFF)

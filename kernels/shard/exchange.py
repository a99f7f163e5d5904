"""Device code by which the ranks of a sharded LM head tell each other one word per slot.

A word is 64 bits of which bit 31 is free: a packed candidate (noise.keys.ordered_key), an fp32
number, or an integer of 62 bits. Every rank has a buffer that all ranks can write to
(shard.vocab_shard). A slot has two places there for every rank's word. `send` writes a word to all
ranks, `wait` and `received` are for theirs, and `advance` ends the exchange.

Data and signal are one: a word travels with a flag in bit 31, which differs from that of the word
it replaces, so one 8-byte write is all there is to order. Successive words of a slot alternate
between its two places. That is enough: a rank writes word c + 2 of a slot, in a later launch, after
it received all words c + 1; a rank sends its word c + 1 in a launch that starts when the one that
read words c has ended. So no word is overwritten that somebody still has to read, however far the
ranks drift. The count c is kept on the device, per slot: a replayed CUDA graph counts on.
"""

import triton
import triton.language as tl

from fsbench.kernels import shard
from fsbench.kernels.device.mass import add_masses, no_mass

AREAS = tl.constexpr(shard.AREAS)
PATIENCE = tl.constexpr(600 * 10**9)
"""Nanoseconds that a rank waits for another's word before it stops with an error (trap)."""


@triton.jit
def send(word, slot, there, line, RANKS: tl.constexpr):
    """Write the words of slots to all ranks; returns how many each slot had before.

    Args:
        word: int64, bit 31 of no meaning. slot: int32. there: bool; all of one shape.
        line: (addresses of the ranks' buffers, counts of this rank, its number, slots per area).
    """
    buffers_ptr, counts_ptr, rank, area = line
    count = tl.load(counts_ptr + slot, mask=there, other=0)
    word = (word & ~(1 << 31)) | (_flag(count) << 31)
    at = ((count & 1) * RANKS + rank) * (AREAS * area) + slot
    for k in tl.static_range(RANKS):
        buffer = tl.load(buffers_ptr + k).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(buffer + at, word, mask=there, sem="relaxed", scope="sys")
    return count


@triton.jit
def _flag(count):
    """Of the word that is number `count` of its slot: 1, 1, 0, 0, 1, 1, ... A new buffer has 0."""
    return (((count >> 1) & 1) ^ 1).to(tl.int64)


@triton.jit
def wait(count, slot, there, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """Until all ranks' words of slots have come, whose count was `count` at `send`.

    WATCH: stop with an error after PATIENCE (not in the interpreter, which has no clock).
    """
    began = _now() if WATCH else 0
    while _any(there & _missing(count, slot, there, line, RANKS)):
        if WATCH:
            _stop_if_late(began)


@triton.jit
def _missing(count, slot, there, line, RANKS: tl.constexpr):
    """Which slots still have the word before in a rank's place."""
    found = slot < 0
    for k in tl.static_range(RANKS):
        word = tl.load(_place(k, count, slot, line, RANKS), mask=there, other=0, volatile=True)
        found |= ((word >> 31) & 1) != _flag(count)
    return found


@triton.jit
def received(k, count, slot, there, line, RANKS: tl.constexpr):
    """Rank k's words of slots, after `wait`; bit 31 is 0.

    Loaded once more: of several threads that hold a row, `wait` asks one whether its word has come.
    """
    word = tl.load(_place(k, count, slot, line, RANKS), mask=there, other=0, volatile=True)
    return word & ~(1 << 31)


@triton.jit
def _place(k, count, slot, line, RANKS: tl.constexpr):
    """Where rank k's words arrive here."""
    buffers_ptr, _, rank, area = line
    mine = tl.load(buffers_ptr + rank).to(tl.pointer_type(tl.int64))
    return mine + ((count & 1) * RANKS + k) * (AREAS * area) + slot


@triton.jit
def advance(count, slot, there, line):
    """Count the words of slots, after all of them have been received."""
    _, counts_ptr, _, _ = line
    # Several warps hold a row and load its count, one stores the next: a warp that came late would
    # load that one, and wait for words that nobody sends before it has ended.
    tl.debug_barrier()
    tl.store(counts_ptr + slot, count + 1, mask=there)


@triton.jit
def _any(condition):
    """Whether it holds anywhere; every thread of the program sees the same."""
    found = condition.to(tl.int32)
    if len(found.shape) == 2:
        found = tl.max(found, axis=1)
    return tl.max(found, axis=0) != 0


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
def best_of_ranks(key, logits, slot, there, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """(the best candidate of all ranks, the logit that came with it).

    Args:
        key: int64, packed candidates of this rank. logits: (their fp32 logits,), or ().
        slot: int32, below `area`.
    """
    logit_slot = slot + line[3]
    count = send(key, slot, there, line, RANKS)
    logit_count = count
    if len(logits) > 0:
        logit_count = send(_word(logits[0]), logit_slot, there, line, RANKS)
    wait(count, slot, there, line, RANKS, WATCH)
    if len(logits) > 0:
        wait(logit_count, logit_slot, there, line, RANKS, WATCH)
    best = key
    best_logits = logits
    for k in tl.static_range(RANKS):
        theirs = received(k, count, slot, there, line, RANKS)
        if len(logits) > 0:
            word = received(k, logit_count, logit_slot, there, line, RANKS)
            best_logits = (tl.where(theirs > best, _number(word), best_logits[0]),)
        best = tl.maximum(best, theirs)
    advance(count, slot, there, line)
    if len(logits) > 0:
        advance(logit_count, logit_slot, there, line)
    return best, best_logits


@triton.jit
def mass_of_ranks(mass, row, there, line, RANKS: tl.constexpr, WATCH: tl.constexpr):
    """The masses of rows over all ranks, from this rank's (device.mass): the bits of one rank."""
    words = (_word(mass[0]),)
    for i in tl.static_range(1, len(mass)):
        words += (_spread(mass[i]),)
    counts = ()
    for i in tl.static_range(len(mass)):
        counts += (send(words[i], row + (2 + i) * line[3], there, line, RANKS),)
    for i in tl.static_range(len(mass)):
        wait(counts[i], row + (2 + i) * line[3], there, line, RANKS, WATCH)
    total = no_mass((row * 0).to(tl.float32), len(mass) > 3)
    for k in tl.static_range(RANKS):
        words = ()
        for i in tl.static_range(len(mass)):
            words += (received(k, counts[i], row + (2 + i) * line[3], there, line, RANKS),)
        theirs = (_number(words[0]),)
        for i in tl.static_range(1, len(mass)):
            theirs += (_gathered(words[i]),)
        total = add_masses(total, theirs)
    for i in tl.static_range(len(mass)):
        advance(counts[i], row + (2 + i) * line[3], there, line)
    return total


@triton.jit
def _word(number):
    """An fp32 number as a word."""
    return number.to(tl.int32, bitcast=True).to(tl.int64) << 32


@triton.jit
def _number(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _spread(integer):
    """An integer of up to 62 bits as a word."""
    return ((integer >> 31) << 32) | (integer & 0x7FFFFFFF)


@triton.jit
def _gathered(word):
    return ((word >> 32) << 31) | (word & 0x7FFFFFFF)

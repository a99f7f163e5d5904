"""`VocabShard`: one rank's rows of an LM head, and its line to the ranks that have the others.

What crosses the ranks is one word per row and sample (shard.exchange), through memory that all GPUs
of an NVLink domain map: torch.distributed's symmetric memory. On a CPU the ranks use the process
group's own collectives instead.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.identity import Keyed, Source
from fsbench.kernels.checks.tensors import check_matrices, check_tensor
from fsbench.kernels.checks.values import check_integer
from fsbench.kernels.shard import AREAS

if dist.is_available():  # some builds of torch are without it, and draw from whole heads
    import torch.distributed._symmetric_memory as symmetric
    from torch.distributed import ProcessGroup

SHARD_UNIT = 256
"""Shards begin at multiples of it: the widest tile, so that a tile and the groups of its noise lie
in one shard, and its logits are summed up in the order of one GPU."""
_SLOTS = 4096


class Line(NamedTuple):
    """What a kernel needs to reach the other ranks; see shard.exchange.send.

    buffer: int64 [2, ranks, AREAS, slots], this rank's, written by all ranks.
    buffers: int64 [ranks], the addresses of all of them. counts: int32 [AREAS, slots].
    """

    buffer: Tensor
    buffers: Tensor
    counts: Tensor
    handle: object


def pack(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return int64 keys of scores, rounded to fp32, and tokens, as `noise.keys.ordered_key` does.

    This and `unpack` are for CPUs without Triton.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (0x7FFFFFFF - tokens.clamp_min(0))


def unpack(keys: Tensor) -> Tensor:
    """Return the tokens of keys, -1 where the score is not finite, as `token_of_key` does."""
    ordered = keys >> 32
    finite = (ordered < 0x7F800000) & (ordered > -0x7F800001)
    return torch.where(finite, 0x7FFFFFFF - (keys & 0x7FFFFFFF), -1)


def block_bounds(sizes: list[int], vocab_size: int) -> list[int]:
    """Where shards of these sizes begin, moved up to multiples of SHARD_UNIT; and the last's end.

    Raises:
        InvalidArgument: a rank is left without a token, or the shards have too few.
    """
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    if bounds[-1] < vocab_size:
        raise InvalidArgument(
            f"vocab_size: expected at most {bounds[-1]}, the rows of all shards; got {vocab_size}"
        )
    bounds = [min(vocab_size, -(-bound // SHARD_UNIT) * SHARD_UNIT) for bound in bounds]
    for rank, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            raise InvalidArgument(
                f"weight: expected shards that hold a block of {SHARD_UNIT} tokens each; rank "
                f"{rank} of {len(sizes)} has none, with {sizes} rows for {vocab_size} tokens"
            )
    return bounds


class VocabShard(Keyed):
    """The rows of an LM head's weight that this rank has, for flash_sample in place of the weight.

    Args:
        weight: [rows, D] of this rank, contiguous. The shards of a group's ranks, in their order,
            are the rows of the whole weight; they may differ in size.
        group: a process group of torch.distributed, the default one if None. On GPUs its ranks
            must be GPUs of one NVLink domain (symmetric memory has to be possible between them).
        vocab_size: of the whole vocabulary, if padding rows follow the tokens.
        slots: rows times samples that one call can draw, at most.

    All ranks construct it together. Shards are used from a multiple of 256 tokens to the next:
    rows before the first one move to the rank before, whose shard is then copied, once. A split
    with bounds at such multiples (`even_blocks`) copies nothing. Where something is copied, a
    weight that has changed is refused until all ranks call `refresh`.

    Calls with one VocabShard follow each other on every rank, on one stream or ordered by events,
    and in the same order on all ranks, as with any collective; two of them are independent. A rank
    that waits ten minutes for another stops with a CUDA error.

    Attributes: weight [num_tokens or more, D], first_token, num_tokens: what this rank draws from.
    vocab_size, rank, ranks, group.

    Raises:
        InvalidType, InvalidArgument: a weight that flash_sample would not take, D, dtype or device
            that differ between ranks, a rank that is left without a token, or no process group.
        RuntimeError: torch's own, where there is no symmetric memory.
    """

    instead = "construct it on all ranks of its group, of the weight"

    def __init__(
        self,
        weight: Tensor,
        group: ProcessGroup | None = None,
        *,
        vocab_size: int | None = None,
        slots: int = _SLOTS,
    ):

        if not isinstance(weight, torch.Tensor):
            raise InvalidType(f"weight: expected a tensor; got {type(weight).__name__}")
        check_matrices(weight[:1], weight)
        check_integer("slots", slots, 1, 2**24)
        self.group = _process_group(group)
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        mine = (weight.shape[1], weight.dtype, weight.device.type)
        facts: list[tuple[int, tuple[object, ...]]] = [(0, ())] * self.ranks
        dist.all_gather_object(facts, (len(weight), mine), self.group)
        for rank, (_, theirs) in enumerate(facts):
            if theirs != mine:
                raise InvalidArgument(
                    f"weight: expected D, dtype and device alike on all ranks; got {mine} "
                    f"on rank {self.rank}, {theirs} on rank {rank}"
                )
        sizes = [size for size, _ in facts]
        V = check_integer("vocab_size", sum(sizes) if vocab_size is None else vocab_size, 1, 2**31)
        bounds = block_bounds(sizes, V)
        self.vocab_size = V
        self.first_token = bounds[self.rank]
        self.num_tokens = bounds[self.rank + 1] - self.first_token
        self.slots = slots
        self._split = (sizes, bounds)
        self._source, self._rows = Source(weight), weight
        self.weight = _rows_of_blocks(weight, sizes, bounds, self.rank, self.group)
        self.line = _line(self, slots) if self._maps_memory() else None
        self.register()

    def check_source(self) -> None:
        """Refuse a weight that was written to since, as far as torch knows (checks.identity).

        A split that copies nothing draws from the rows themselves, whatever is in them.

        Raises:
            InvalidArgument: the weight has changed, and some rank draws from a copy of its rows.
        """
        sizes, bounds = self._split
        if any(bound != sum(sizes[:rank]) for rank, bound in enumerate(bounds[:-1])):
            self._source.check("shard", self._rows)

    def refresh(self, weight: Tensor | None = None) -> None:
        """Take this rank's rows as they are now, or others in their place; all ranks together.

        Rows that are a copy are copied again in place, so that CUDA graphs go on with them.

        Raises:
            InvalidType, InvalidArgument: a weight of another shape, dtype or device than before.
        """
        old, new = self._rows, self._rows if weight is None else weight
        check_tensor("weight", new, [old.dtype], [tuple(old.shape)], old.device)
        sizes, bounds = self._split
        self._source, self._rows = Source(new), new
        rows = _rows_of_blocks(new, sizes, bounds, self.rank, self.group)
        if bounds[self.rank + 1] > sum(sizes[: self.rank + 1]):
            self.weight.copy_(rows)
        else:
            self.weight = rows

    def gather(self, values: Tensor) -> Tensor:
        """values of all ranks, stacked in their order, by a collective of the group."""

        stacked = values.new_empty(self.ranks * values.numel())
        # Its name before torch 2.13, and since.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(stacked, values.flatten(), self.group)
        return stacked.view(self.ranks, *values.shape)

    def best_of_ranks(self, tokens: Tensor, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [B] of the best scores over all ranks, the lowest of equal ones; their values.

        -1 where the best score is not finite.
        """
        all_scores = self.gather(scores)
        best = all_scores.argmax(0, keepdim=True)  # the first: lower ranks have lower tokens
        tokens = self.gather(tokens).gather(0, best)[0]
        tokens = torch.where(all_scores.amax(0).isfinite(), tokens, -1)
        return tokens, self.gather(value).gather(0, best)[0]

    def _maps_memory(self) -> bool:
        return self.ranks > 1 and self.weight.device.type == "cuda"


def _process_group(group: object) -> ProcessGroup:
    """Return the group, or torch's default one for None.

    Raises:
        InvalidType: another object. InvalidArgument: there is no default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "group: expected a process group; torch.distributed has none: call "
            "torch.distributed.init_process_group before"
        )
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        raise InvalidType(f"group: expected a process group; got {type(found).__name__}")
    return found


def reachable(shard: VocabShard | None) -> bool:
    """Whether a kernel can reach the other ranks, if there are any."""
    return shard is None or shard.ranks == 1 or shard.line is not None


def even_blocks(V: int, ranks: int) -> list[int]:
    """Bounds of a split of V tokens at multiples of 256, as even as can be; ranks + 1 of them.

    Raises:
        InvalidType, InvalidArgument: V or ranks is no integer, or below 1.
    """
    check_integer("V", V, 1, 2**31)
    check_integer("ranks", ranks, 1, 2**31)
    blocks = -(-V // SHARD_UNIT)
    return [min(V, blocks * rank // ranks * SHARD_UNIT) for rank in range(ranks)] + [V]


def _rows_of_blocks(
    weight: Tensor, sizes: list[int], bounds: list[int], rank: int, group: ProcessGroup
) -> Tensor:
    """This rank's rows from its bound to the next: a view, or a copy with rows of later ranks."""

    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    mine = weight[bounds[rank] - starts[rank] : bounds[rank + 1] - starts[rank]]
    # A shard gives the rows before its first block to the rank before.
    for giver in range(1, len(sizes)):
        given = bounds[giver] - starts[giver]
        if given == 0:
            continue
        rows = weight[:given] if giver == rank else weight.new_empty(given, weight.shape[1])
        dist.broadcast(rows, dist.get_global_rank(group, giver), group)
        if giver == rank + 1:
            mine = torch.cat((mine, rows))
    return mine


def _line(shard: VocabShard, slots: int) -> Line:
    """Buffers of all ranks in symmetric memory, all zero."""

    device = shard.weight.device
    # Only plain loads and stores are used; a multicast object takes resources of the host.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

    with torch.cuda.device(device):
        buffer = symmetric.empty(2, shard.ranks, AREAS, slots, dtype=torch.int64, device=device)
        handle = symmetric.rendezvous(buffer, shard.group)
        buffer.zero_()
        torch.cuda.synchronize()
        # A tensor may begin anywhere in what was mapped.
        offsets = [0] * shard.ranks
        offset = buffer.data_ptr() - handle.buffer_ptrs[shard.rank]
        dist.all_gather_object(offsets, offset, shard.group)  # and all buffers are zero now
        addresses = [
            pointer + behind for pointer, behind in zip(handle.buffer_ptrs, offsets, strict=True)
        ]
        return Line(
            buffer,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(AREAS, slots, dtype=torch.int32, device=device),
            handle,
        )

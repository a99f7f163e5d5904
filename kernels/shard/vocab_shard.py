"""`VocabShard`: one rank's rows of an LM head, and its buffers for the exchange with other ranks.

Ranks send one word per row and sample (shard.exchange) through memory that all GPUs of an NVLink
domain map: torch.distributed's symmetric memory. On a CPU the ranks use collectives of the process
group instead.
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

if dist.is_available():  # builds of torch without it draw from whole heads
    import torch.distributed._symmetric_memory as symmetric
    from torch.distributed import ProcessGroup

SHARD_UNIT = 256
"""Shards begin at multiples of the widest tile. So a tile and the groups of its noise are in one
shard, and its logits are summed in the order of one GPU."""
_SLOTS = 4096


class Line(NamedTuple):
    """Buffers that a kernel needs to reach the other ranks; see shard.exchange.send.

    Attributes:
        buffer: int64 [2, ranks, AREAS, slots], of this rank, written by all ranks.
        buffers: int64 [ranks], addresses of the buffers of all ranks.
        counts: int32 [AREAS, slots].
        handle: Keeps the symmetric memory alive.
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
    """Return the first token of each shard, rounded up to multiples of SHARD_UNIT, and the end.

    Raises:
        InvalidArgument: A rank has no token, or the shards have too few.
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
    """This rank's rows of an LM head's weight, which flash_sample takes in place of the weight.

    All ranks construct it together. The tokens of a shard begin at a multiple of 256: rows before
    it move to the previous rank, whose shard is then copied, once. A split with bounds at such
    multiples (`even_blocks`) copies nothing. If a shard is a copy, a weight that has changed is
    refused until all ranks call `refresh`.

    Calls with one VocabShard follow each other on every rank, on one stream or ordered by events,
    in the same order on all ranks, as with any collective. Two VocabShards are independent. A rank
    that waits ten minutes for another stops with a CUDA error.

    Args:
        weight: [rows, D] of this rank, contiguous. The shards of a group's ranks, in their order,
            are the rows of the whole weight; they may differ in size.
        group: A process group of torch.distributed; the default group if None. On GPUs its ranks
            must be GPUs of one NVLink domain, which can share symmetric memory.
        vocab_size: Size of the whole vocabulary, if padding rows follow the tokens.
        slots: Most rows times samples of one call.

    Attributes:
        weight: [num_tokens or more, D], the rows that this rank draws from.
        first_token, num_tokens: Their tokens.
        vocab_size, rank, ranks, group: As passed, or of the group.
        sizes: The rows of each rank's weight.

    Raises:
        InvalidType, InvalidArgument: A weight that flash_sample does not take; D, dtype or device
            that differ between ranks; a rank without a token; or no process group.
        RuntimeError: From torch, if there is no symmetric memory.
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
        form = (weight.shape[1], weight.dtype, weight.device.type)
        facts: list[tuple[int, tuple[object, ...]]] = [(0, ())] * self.ranks
        dist.all_gather_object(facts, (len(weight), form), self.group)
        for rank, (_, other) in enumerate(facts):
            if other != form:
                raise InvalidArgument(
                    f"weight: expected the same D, dtype and device on all ranks; got {form} "
                    f"on rank {self.rank}, {other} on rank {rank}"
                )
        self.sizes = sizes = [size for size, _ in facts]
        V = check_integer("vocab_size", sum(sizes) if vocab_size is None else vocab_size, 1, 2**31)
        self._bounds = bounds = block_bounds(sizes, V)
        self.vocab_size = V
        self.first_token = bounds[self.rank]
        self.num_tokens = bounds[self.rank + 1] - self.first_token
        self.slots = slots
        self._source, self._rows = Source(weight), weight
        self.weight = _rows_of_blocks(weight, sizes, bounds, self.rank, self.group)
        self.line = _line(self, slots) if self._maps_memory() else None
        self.register()

    def check_source(self) -> None:
        """Refuse a weight that torch knows to be written to since its rows were copied.

        See checks.identity. A split that copies nothing draws from the current rows.

        Raises:
            InvalidArgument: The weight has changed, and a rank draws from a copy of its rows.
        """
        if any(bound != sum(self.sizes[:rank]) for rank, bound in enumerate(self._bounds[:-1])):
            self._source.check("shard", self._rows)

    def refresh(self, weight: Tensor | None = None) -> None:
        """Take the current values of this rank's rows, or another weight, on all ranks together.

        Copied rows are copied again in place, so that CUDA graphs read the new values.

        Raises:
            InvalidType, InvalidArgument: A weight of another shape, dtype or device than before.
        """
        old, new = self._rows, self._rows if weight is None else weight
        check_tensor("weight", new, [old.dtype], [tuple(old.shape)], old.device)
        sizes, bounds = self.sizes, self._bounds
        self._source, self._rows = Source(new), new
        rows = _rows_of_blocks(new, sizes, bounds, self.rank, self.group)
        if bounds[self.rank + 1] > sum(sizes[: self.rank + 1]):
            self.weight.copy_(rows)
        else:
            self.weight = rows

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, stacked in their order, by a collective of the group."""
        stacked = values.new_empty(self.ranks * values.numel())
        # all_gather_single since torch 2.13
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(stacked, values.flatten(), self.group)
        return stacked.view(self.ranks, *values.shape)

    def best_of_ranks(self, tokens: Tensor, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens [B] of the best scores over all ranks, and their values [B].

        Of equal scores the lowest token; -1 if the best score is not finite.
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
        InvalidType: It is another object.
        InvalidArgument: There is no default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            "group: expected a process group; torch.distributed has none: call "
            "torch.distributed.init_process_group before"
        )
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, ProcessGroup):
        raise InvalidType(f"group: expected a process group; got {type(group).__name__}")
    return group


def reachable(shard: VocabShard | None) -> bool:
    """Return whether a kernel can reach the other ranks, if there are any."""
    return shard is None or shard.ranks == 1 or shard.line is not None


def even_blocks(V: int, ranks: int) -> list[int]:
    """Return the ranks + 1 bounds of the most even split of V tokens at multiples of 256.

    Raises:
        InvalidType, InvalidArgument: V or ranks is not an integer, or is below 1.
    """
    check_integer("V", V, 1, 2**31)
    check_integer("ranks", ranks, 1, 2**31)
    blocks = -(-V // SHARD_UNIT)
    return [min(V, blocks * rank // ranks * SHARD_UNIT) for rank in range(ranks)] + [V]


def _rows_of_blocks(
    weight: Tensor, sizes: list[int], bounds: list[int], rank: int, group: ProcessGroup
) -> Tensor:
    """Return this rank's rows between its bounds: a view, or a copy with rows of later ranks."""
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    shard = weight[bounds[rank] - starts[rank] : bounds[rank + 1] - starts[rank]]
    # A rank sends the rows before its first block to the previous rank.
    for sender in range(1, len(sizes)):
        number = bounds[sender] - starts[sender]
        if number == 0:
            continue
        rows = weight[:number] if sender == rank else weight.new_empty(number, weight.shape[1])
        dist.broadcast(rows, dist.get_global_rank(group, sender), group)
        if sender == rank + 1:
            shard = torch.cat((shard, rows))
    return shard


def _line(shard: VocabShard, slots: int) -> Line:
    """Allocate the buffers of all ranks in symmetric memory, filled with zeros."""
    device = shard.weight.device
    # Only plain loads and stores are used; a multicast object needs resources of the host.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

    with torch.cuda.device(device):
        buffer = symmetric.empty(2, shard.ranks, AREAS, slots, dtype=torch.int64, device=device)
        handle = symmetric.rendezvous(buffer, shard.group)
        buffer.zero_()
        torch.cuda.synchronize()
        # A tensor may begin anywhere in the mapped memory.
        offsets = [0] * shard.ranks
        offset = buffer.data_ptr() - handle.buffer_ptrs[shard.rank]
        dist.all_gather_object(offsets, offset, shard.group)  # and all buffers are zero now
        addresses = [
            start + shift for start, shift in zip(handle.buffer_ptrs, offsets, strict=True)
        ]
        return Line(
            buffer,
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(AREAS, slots, dtype=torch.int32, device=device),
            handle,
        )

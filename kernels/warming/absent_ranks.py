"""A process group of ranks that do not exist, to compile the kernels of a sharded LM head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

if dist.is_available():  # builds of torch without it have no ranks
    import torch.distributed._symmetric_memory as symmetric
    from torch.distributed import ProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def absent_ranks(ranks: int, rank: int = 0) -> Iterator[ProcessGroup]:
    """Yield the group of a rank whose peers are absent; for use inside `without_gpu`.

    Collectives move nothing, each rank is taken to have the facts of this one (as many rows, for
    one), and symmetric memory is not mapped. The process must have no default group.
    """

    def gathered(facts: list[object], fact: object, group: object = None) -> None:
        facts[:] = [fact] * len(facts)

    rendezvous = mock.Mock(return_value=mock.Mock(buffer_ptrs=[0] * ranks))
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        with (
            mock.patch.object(dist, "all_gather_object", gathered),
            mock.patch.multiple(symmetric, empty=torch.empty, rendezvous=rendezvous),
            mock.patch.multiple(torch.cuda, device=mock.MagicMock(), synchronize=mock.Mock()),
        ):
            group = dist.group.WORLD
            assert group is not None
            yield group
    finally:
        dist.destroy_process_group()

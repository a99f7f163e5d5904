"""The ranks that measure together: their process groups, and how a weight is split over them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsbench.provider import Shard

T = TypeVar("T")


def even_sizes(V: int, ranks: int) -> list[int]:
    """Return the rows of each rank as engines split them: V / ranks, rounded up for the first."""
    return [V // ranks + (rank < V % ranks) for rank in range(ranks)]


def _is_one_host(ranks: int, meet: str) -> bool:
    """Return whether all ranks run on this host, by a shared file or torchrun's variables."""
    return meet.startswith("file:") or os.environ.get("LOCAL_WORLD_SIZE") == str(ranks)


def _loopback() -> str:
    """Return the name of the loopback interface: gloo would listen on the host's public address."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")


@dataclass(frozen=True)
class Team:
    """This process as one of `ranks` ranks.

    group: process group for samplers: NCCL between GPUs, gloo between CPUs.
    control: gloo group for the harness, which works while GPUs are busy.
    """

    rank: int
    ranks: int
    device: str
    group: Any
    control: Any

    @classmethod
    def join(cls, device: str, rank: int, ranks: int, meet: str, seconds: float) -> Team:
        """Meet the other ranks; block until all have come.

        Args:
            device: "cuda" (the current one) or "cpu".
            meet: `init_method` of torch.distributed.
            seconds: timeout of waiting for another rank (RuntimeError).
        """
        if _is_one_host(ranks, meet):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        patience = timedelta(seconds=seconds)
        gpu = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            init_method=meet,
            rank=rank,
            world_size=ranks,
            timeout=patience,
            device_id=gpu,
        )
        control = dist.new_group(backend="gloo", timeout=patience)
        return cls(rank, ranks, device, dist.group.WORLD, control)

    def leave(self) -> None:
        """Destroy the process groups; all ranks call, after their last collective.

        Without this call a process may abort at its end: a thread of gloo that releases a tensor
        while Python shuts down makes C++ call std::terminate.
        """
        dist.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in rank order. All ranks call."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, self.control)
        return values

    def shard(self, weight: Tensor) -> Shard:
        """Return this rank's rows of a whole weight [V, D], as a view."""
        sizes = even_sizes(len(weight), self.ranks)
        first = sum(sizes[: self.rank])
        rows = weight[first : first + sizes[self.rank]]
        return Shard(rows, tuple(sizes), self.rank, self.group)

    def align(self) -> None:
        """Queue an all-reduce of one number, so that the next work of all ranks starts together.

        No rank's all-reduce ends before the last rank's has begun.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

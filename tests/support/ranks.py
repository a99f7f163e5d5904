"""Runs a function on several ranks: processes of a gloo group on this machine's CPU."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor


def on_ranks(
    ranks: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    seconds: float = 1500,
) -> list[Any]:
    """function(rank, *args) of every rank, run at the same time; its error, if one fails.

    Results are plain data (no tensors). No process is left behind, whatever happens.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.Queue()
        started = [
            context.Process(
                target=_rank, args=(rank, ranks, backend, folder, results, function, args)
            )
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        try:
            answers: dict[int, Any] = {}
            end = time.monotonic() + seconds
            while len(answers) < ranks:
                rank, answer, error = _next_answer(results, started, end)
                if error:
                    raise AssertionError(f"rank {rank}: {error}")
                answers[rank] = answer
            return [answers[rank] for rank in range(ranks)]
        finally:
            for process in started:
                process.kill()
                process.join()


def _next_answer(results: Any, started: Sequence[Any], end: float) -> tuple[int, Any, str]:
    """(rank, answer, error) of the next rank that answers; AssertionError if one cannot."""
    while True:
        try:
            answer: tuple[int, Any, str] = results.get(timeout=1)
            return answer
        except queue.Empty:
            # A rank that has answered does not exit: it waits until it is killed.
            for rank, process in enumerate(started):
                if process.exitcode is not None:
                    message = f"rank {rank} exited with code {process.exitcode}"
                    raise AssertionError(message) from None
            if time.monotonic() > end:
                raise


def _rank(
    rank: int,
    ranks: int,
    backend: str,
    folder: str,
    results: Any,
    function: Callable[..., Any],
    args: Any,
) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    try:
        torch.set_num_threads(1)
        if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
            import faster_interpreter

            faster_interpreter.make_faster()
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
        )
        results.put((rank, function(rank, *args), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    # Others may still need this rank's end of the group; the parent ends this process.
    time.sleep(3600)


def _end_with(parent: int) -> None:
    """A rank does not outlive the tests, even if these are killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def own_rows(weight: Tensor, rank: int, sizes: Sequence[int]) -> Tensor:
    """A rank's shard of a weight."""
    first = sum(sizes[:rank])
    return weight[first : first + sizes[rank]].clone()


KINDS = ("plain", "everything", "greedy", "token noise", "NaN")


def call_of(kind: str, B: int, V: int, device: str = "cpu") -> dict[str, object]:
    """Arguments of flash_sample by one of KINDS; two of these need at least 5 rows."""
    generator = torch.Generator(device).manual_seed(3)
    row = torch.arange(B, device=device)
    if kind == "everything":
        mask = torch.rand(B, V, generator=generator, device=device) < 0.3
        mask[3] = False  # no draw
        mask[4, : V - 52] = False  # the last rank's alone
        return {
            "seed": row * 0x0123456789AB + 1,
            "offset": 9 - row % 9,
            "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0], device=device)[row % 5],
            "bias": torch.randn(B, V, generator=generator, device=device),
            "mask": mask,
            "soft_cap": 5.0,
            "num_samples": 3,
        }
    seed, offset = torch.tensor([[77], [5]], device=device)
    more: dict[str, dict[str, object]] = {
        "greedy": {"temperature": 0.0},
        "token noise": {"noise": "token"},
    }
    if kind == "NaN":
        bias = torch.zeros(B, V, device=device)
        bias[1, V - 1], bias[2, 0], bias[3, :600] = torch.nan, torch.inf, -torch.inf
        more["NaN"] = {"bias": bias}
    return {"seed": seed, "offset": offset, **more.get(kind, {})}


class SharedLine:
    """A Line over memory that the processes share, so that the interpreter runs the exchange.

    Every rank maps the buffers of all of them: files in a folder that all know.
    """

    def __init__(self, shard: Any, folder: str, areas: int):
        shape = (2, shard.ranks, areas, shard.slots)
        size = 2 * shard.ranks * areas * shard.slots
        self.maps: list[Tensor] = []
        for rank in range(shard.ranks):
            path = os.path.join(folder, f"buffer-{rank}")
            self.maps.append(torch.from_file(path, shared=True, size=size, dtype=torch.int64))
        self.buffer = self.maps[shard.rank].view(shape)
        self.buffers = torch.tensor([m.data_ptr() for m in self.maps], dtype=torch.int64)
        self.counts = torch.zeros(areas, shard.slots, dtype=torch.int32)
        dist.barrier()

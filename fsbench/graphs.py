"""Capture of one decode step in a CUDA graph, as serving engines replay it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fsbench.provider import Launch


def capture(launch: Launch, hidden: Tensor, seed: Tensor, offset: Tensor) -> Callable[[], Tensor]:
    """Capture a launch; return a function that replays it and returns its (static) output.

    The launch is called on a side stream first, so that lazy initialization is not captured. The
    graph reads hidden, seed and offset in place at every replay. The function keeps them and the
    launch with its tensors alive, because a graph only has addresses.
    """
    stream = torch.cuda.Stream(hidden.device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            launch(hidden, seed, offset)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Not "global": a thread of NCCL queries events all the time, which would end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        tokens = launch(hidden, seed, offset)

    def replay(*kept: object) -> Tensor:
        graph.replay()
        return tokens

    return partial(replay, launch, hidden, seed, offset)

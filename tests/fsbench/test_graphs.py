"""Capture of a launch, on a double of CUDA."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fsbench.graphs import capture


@pytest.fixture
def cuda(monkeypatch):
    """Replace streams by no-ops, and a graph by one that counts its replays."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replays=0)

    def replay():
        graph.replays += 1

    graph.replay = replay
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    return graph


def test_a_replay_launches_nothing_and_returns_the_same_tensor(cuda):
    calls = []

    def launch(hidden, seed, offset):
        calls.append(hidden)
        return hidden + 1

    replay = capture(launch, torch.zeros(2), torch.zeros(1), torch.zeros(1))
    assert len(calls) == 3  # twice to warm up, once to be captured
    assert replay() is replay()
    assert (len(calls), cuda.replays) == (3, 2)


def test_tensors_that_a_graph_reads_live_as_long_as_it(cuda):
    """FlashInfer's temperature on the device was freed, and its memory used again."""
    temperature = torch.ones(())

    def launch(hidden, seed, offset, divisor=temperature):
        return hidden / divisor

    inputs = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]
    watched = [weakref.ref(tensor) for tensor in (temperature, *inputs)]
    replay = capture(launch, *inputs)
    del launch, temperature, inputs
    gc.collect()
    assert all(reference() is not None for reference in watched)
    del replay
    gc.collect()
    assert not any(reference() for reference in watched)

"""The plug-in in the measured vLLM on two GPUs: the tokens are those of one. About 160 s.

The two engines run in separate processes and start at the same time.
"""

from __future__ import annotations

import pytest
import torch
from residual_model import V, write_model
from serve_ranks import BATCHES, ROWS, UNSERVED, Server, differences, kind_of, length_of

from fsbench.integrations import vllm as plugin
from fsbench.machine.packages import package_version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
    pytest.mark.skipif(
        (package_version("vllm") or "").split("+")[0] != plugin.SUPPORTED,
        reason=f"vLLM {plugin.SUPPORTED} is not installed",
    ),
]
START_S = 240


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return (results on one GPU, results on two, the log of these)."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    servers = [
        Server(folder, gpus, tmp_path_factory.mktemp("answers") / f"{gpus}.json") for gpus in (1, 2)
    ]
    try:
        one, two = (server.result(START_S) for server in servers)
        return one, two, servers[1].log()
    finally:
        for server in servers:
            server.stop()


@pytest.mark.parametrize("call", BATCHES)
def test_the_tokens_and_log_probabilities_are_those_of_one_gpu(results, call):
    one, two, _ = results
    assert differences(one[call], two[call], call) == []
    tokens = {token for answer in one[call] for token in answer["tokens"]}
    assert len(tokens) > 2 * ROWS  # a model that repeats one token would prove nothing
    assert min(tokens) < 10016 <= max(tokens)  # of both ranks


@pytest.mark.parametrize("call", BATCHES)
def test_every_request_is_answered(results, call):
    for result in results[:2]:
        for row, answer in enumerate(result[call]):
            assert len(answer["tokens"]) == length_of(row)
            assert all(0 <= token < V for token in answer["tokens"])


def test_each_rank_counts_what_it_served_and_why_not(results):
    one, two, log = results
    assert "fsbench: flash_sample draws" in log
    assert log.count("kernels compiled ahead in") == 2  # by each rank
    assert len(two["counts"]) == 2 and two["counts"][0] == two["counts"][1]
    (alone,) = one["counts"]
    assert not alone["left"]
    served, unserved = 0, dict.fromkeys(UNSERVED.values(), 0)
    for call in BATCHES:
        for row in range(ROWS):
            kind = kind_of(call, row)
            if kind in UNSERVED:
                unserved[UNSERVED[kind]] += length_of(row)
            else:
                served += length_of(row)
    counts = two["counts"][0]
    assert counts["served"] >= served and counts["left"].keys() == unserved.keys()
    assert all(counts["left"][reason] >= number for reason, number in unserved.items())

"""flash_sample and the samplers over several GPUs: the tokens are those of one GPU.

One process per GPU; a test's ranks make many comparisons, since starting them takes seconds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_sample_cases import same_bits
from ranks import call_of, on_ranks, own_rows
from torch import Tensor

from fsbench.discover import discover
from fsbench.graphs import capture
from fsbench.kernels import VocabShard, flash_sample, prepare_head, screened_sample
from fsbench.kernels.configs.screen_choice import default_configs
from fsbench.kernels.launch.result import Screened
from fsbench.problem import Problem
from fsbench.provider import Kind, Shard
from fsbench.verify.pathwise import check_on_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "ranks",
        [
            pytest.param(
                ranks,
                marks=pytest.mark.skipif(
                    torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs"
                ),
            )
            for ranks in (2, 4)
        ],
    ),
]


def counter(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cuda")


def head(B: int, V: int, D: int) -> tuple[Tensor, Tensor]:
    """hidden and weight, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(B + V + D)
    hidden = torch.randn(B, D, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(V, D, generator=generator, device="cuda") * 3 / D**0.5
    return hidden, weight.bfloat16()


def uneven(V: int, ranks: int) -> list[int]:
    """Shard sizes that are no multiples of anything."""
    share = V // (2 * ranks)
    sizes = [share + 37 * (rank + 1) for rank in range(ranks - 1)]
    return [*sizes, V - sum(sizes)]


def against_one_gpu(rank: int, ranks: int, kernel: str, name: str) -> list[str]:
    """Return the differences from the samples of one GPU; kernel "both": ranks take turns."""
    wrong = []
    rank_kernel = ("hopper", "portable")[rank % 2] if kernel == "both" else kernel
    kernel = "portable" if kernel == "both" else kernel
    for V, D in ((50_001, 512), (128_256, 1024)):
        for B in (1, 16, 100, 256) if name == "plain" else (64,):
            hidden, weight = head(B, V, D)
            shard = VocabShard(own_rows(weight, rank, uneven(V, ranks)))
            options = call_of(name, B, V, "cuda")
            if name != "plain":
                options |= {"return_logprob": True, "return_logz": True}
            one = flash_sample(hidden, weight, kernel=kernel, **options)
            sharded = flash_sample(hidden, shard, kernel=rank_kernel, **options)
            where = f"V={V} B={B}"
            if not torch.equal(one.tokens, sharded.tokens):
                wrong.append(f"{where}: {int((one.tokens != sharded.tokens).sum())} tokens")
            if not torch.equal(one.valid, sharded.valid):
                wrong.append(f"{where}: valid")
            for field in ("logprob", "logz") if name != "plain" else ():
                a, b = getattr(one, field), getattr(sharded, field)
                if not same_bits(a, b):
                    wrong.append(f"{where}: {field} by {(a - b).nan_to_num().abs().max()}")
                everywhere = shard.gather(b.nan_to_num(-1.0))
                if not torch.equal(everywhere, everywhere[:1].expand_as(everywhere)):
                    wrong.append(f"{where}: {field} differs between ranks")
    return wrong


@pytest.mark.parametrize("name", ["plain", "greedy", "everything"])
@pytest.mark.parametrize("kernel", ["hopper", "portable", "both"])
def test_samples_are_those_of_one_gpu(ranks, kernel, name):
    assert on_ranks(ranks, against_one_gpu, ranks, kernel, name, backend="nccl") == [[]] * ranks


def screened_against_one_gpu(rank: int, ranks: int, name: str, short: bool) -> list[str]:
    """Compare screened heads; short: rank 1 has no room for candidates, and draws rows in full."""
    wrong = []
    for V, D in ((50_001, 512), (128_256, 1024)):
        hidden, weight = head(160, V, D)
        shard = VocabShard(own_rows(weight, rank, uneven(V, ranks)))
        copy = prepare_head(shard.weight)
        for B in (1, 16, 64, 160) if name == "plain" else (64,):
            screen, resolve = default_configs(B, D, hidden.device)
            if short and rank == 1:
                screen = replace(screen, room=1, row_room=16)
            options = {**call_of(name, B, V, "cuda"), "num_samples": 1, "noise": "token"}
            one = flash_sample(hidden[:B], weight, **options)
            drawn = screened_sample(
                hidden[:B], copy, shard=shard, configs=(screen, resolve), **options
            )
            if not torch.equal(one.tokens, drawn.tokens):
                different = int((one.tokens != drawn.tokens).sum())
                wrong.append(f"V={V} B={B}: {different} tokens")
            if not torch.equal(one.valid, drawn.valid):
                wrong.append(f"V={V} B={B}: valid")
    return wrong


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", ["plain", "greedy", "everything"])
def test_screened_tokens_are_those_of_one_gpu(ranks, name, short):
    wrong = on_ranks(ranks, screened_against_one_gpu, ranks, name, short, backend="nccl")
    assert wrong == [[]] * ranks


REPLAYS, EAGER = 200, 40


def screened_steps(rank: int, ranks: int, temperature: float) -> list[str]:
    """Compare replays and eager calls with one GPU: tokens, and how many were computed exactly."""
    V, D = 128_256, 4096
    hidden, weight = head(64, V, D)
    shard = VocabShard(own_rows(weight, rank, uneven(V, ranks)))
    whole, part = prepare_head(weight), prepare_head(shard.weight)
    seed, offset = counter(5), counter(0)
    options = {"seed": seed, "offset": offset, "temperature": temperature}
    wrong = []
    for B in (1, 16, 64):

        def both(B: int = B) -> tuple[Screened, Screened, Tensor]:
            offset.add_(1)
            ranked = screened_sample(hidden[:B], part, shard=shard, **options)
            one = screened_sample(hidden[:B], whole, **options)
            return ranked, one, flash_sample(hidden[:B], weight, noise="token", **options).tokens

        both()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = both()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        num_exact = []
        for call in range(REPLAYS + EAGER):
            if call % 20 == 7 + 3 * rank:  # one rank after the other
                torch.cuda._sleep(200_000 * (1 + call % 3))
            is_eager = call % 6 == 5
            if not is_eager:
                graph.replay()
            ranked, one, expected = both() if is_eager else replayed
            different += (ranked.tokens != expected).sum() + (one.tokens != expected).sum()
            if not is_eager and call % 20 < 5:
                num_exact.append(torch.stack([ranked.found.sum(), one.found.sum()]))
        if different:
            wrong.append(f"B={B}: {int(different)} tokens")
        of_ranks, of_one = shard.gather(torch.stack(num_exact)).sum(0).unbind(1)
        ratio = float((of_ranks / (of_one / ranks)).median())
        # One row's few candidates are found before the other rank's bounds arrive.
        if not ratio < (1.5 if B > 1 else ranks):
            wrong.append(f"B={B}: ranks compute {ratio:.2f} times the tokens of one GPU")
    return wrong


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_screened_steps_are_those_of_one_gpu_and_divide_its_work(ranks, temperature):
    wrong = on_ranks(ranks, screened_steps, ranks, temperature, backend="nccl")
    assert wrong == [[]] * ranks


CALLS = 10_000


def race(rank: int, ranks: int, screened: bool) -> list[str]:
    """Make many short calls, eager and replayed, of changing B; sometimes one rank is late."""
    D, V = 64, 2048
    sizes = [V // ranks] * ranks
    sizes[0] += V % ranks
    hidden, weight = head(32, V, D)
    shard = VocabShard(own_rows(weight, rank, sizes))
    screen = prepare_head(shard.weight)
    seed, offset = counter(5), counter(0)
    batches = (32, 3, 17, 1)
    drawn = [torch.empty(CALLS, B, dtype=torch.int64, device="cuda") for B in batches]
    expected = [torch.empty_like(tokens) for tokens in drawn]

    def one(B: int) -> tuple[Tensor, Tensor]:
        offset.add_(1)
        options = {"seed": seed, "offset": offset, "noise": "token" if screened else "group"}
        if screened:
            tokens = screened_sample(hidden[:B], screen, shard=shard, **options).tokens
        else:
            tokens = flash_sample(hidden[:B], shard, **options).tokens
        return tokens, flash_sample(hidden[:B], weight, **options).tokens

    for B in batches:
        one(B)
    torch.cuda.synchronize()
    replays = []
    for B in batches:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = one(B)
        replays.append((graph, results))
    for call in range(CALLS):
        i = call * 7 % 4
        if call % 97 == 13 * rank:
            torch.cuda._sleep(100_000 * (1 + call % 5))  # up to a third of a millisecond
        if call % 10 == 3:  # eager among the replays
            results = one(batches[i])
        else:
            graph, results = replays[i]
            graph.replay()
        drawn[i][call] = results[0]
        expected[i][call] = results[1]
    torch.cuda.synchronize()
    wrong = []
    for i, B in enumerate(batches):
        calls = [call for call in range(CALLS) if call * 7 % 4 == i]
        different = (drawn[i][calls] != expected[i][calls]).any(1)
        if different.any():
            wrong.append(f"B={B}: {int(different.sum())} of {len(calls)} calls differ")
        # Draws at successive offsets differ, or the graph would not have read them.
        if len(torch.unique(drawn[i][calls][:, 0])) < 20:
            wrong.append(f"B={B}: hardly any two draws differ")
    return wrong


@pytest.mark.parametrize("screened", [False, True])
def test_no_rank_overtakes_another(ranks, screened):
    assert on_ranks(ranks, race, ranks, screened, backend="nccl") == [[]] * ranks


def sharded_samplers(rank: int, ranks: int) -> dict[str, str]:
    """Return name -> mistakes of every sampler over several GPUs, eager and in a graph."""
    import torch.distributed as dist

    wrong = {}
    for name, entry in discover().items():
        provider = entry.provider
        if provider is None or provider.build_sharded is None:
            continue
        if entry.unavailable_reason("cuda") or provider.kind is Kind.LOWER_BOUND:
            continue
        wrong[name], B = "", 64
        problem = Problem(B, 1024, 32_000, tp=ranks)
        hidden, weight = head(B, problem.V, problem.D)
        sizes = [len(part) for part in weight.tensor_split(ranks)]
        torch.manual_seed(0)
        group = dist.group.WORLD
        shard = Shard(own_rows(weight, rank, sizes), tuple(sizes), rank, group)
        launch = provider.build_sharded(problem, shard)
        check = check_on_problem(provider, problem, launch, hidden, weight)
        if not check.passed:
            wrong[name] += f"{check.detail}; "
        seed, offset = counter(3), counter(0)
        step = capture(launch, hidden, seed, offset)
        steps = []
        for _ in range(20):
            offset.add_(1)
            steps.append(step().clone())
        tokens = torch.stack(steps).long()
        everywhere = tokens.new_empty(ranks, *tokens.shape)
        dist.all_gather_into_tensor(everywhere, tokens)
        if not torch.equal(everywhere, tokens.expand_as(everywhere)):
            wrong[name] += "ranks differ in a graph; "
        if len(torch.unique(tokens[:, 0])) < 3:
            wrong[name] += "the graph draws the same token again and again; "
    return wrong


def test_samplers_agree_with_the_oracle_and_between_ranks(ranks):
    results = on_ranks(ranks, sharded_samplers, ranks, backend="nccl")
    assert results[0]
    for wrong in results:
        assert not {name: text for name, text in wrong.items() if text}

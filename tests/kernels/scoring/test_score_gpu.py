"""score on a GPU: the bits of flash_sample by every kernel and tile shape."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import same_bits
from gpu_cases import counter, problem

from fsbench.graphs import capture
from fsbench.kernels import Sample, flash_sample, score
from fsbench.kernels.configs.portable import TileConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

KERNELS = ("portable", "hopper")


def kernels() -> tuple[str, ...]:
    return KERNELS if torch.cuda.get_device_capability() == (9, 0) else KERNELS[:1]


# A test compiles about ten kernels that no other needs, so not every combination is one.
@pytest.mark.parametrize(
    "form, B, dtype",
    [
        *(("everything", B, torch.bfloat16) for B in (1, 64, 129, 257)),
        *(("plain", 1, torch.bfloat16), ("plain", 257, torch.bfloat16)),
        *(("T", 64, torch.bfloat16), ("greedy", 129, torch.bfloat16)),
        *(("plain", 64, torch.float16), ("everything", 129, torch.float16)),
    ],
    ids=str,
)
def test_the_bits_are_those_of_flash_sample(form, B, dtype):
    for V in (129, 151_936):
        hidden, weight = problem(B, V, 512, dtype)
        row = torch.arange(B, device="cuda")
        T = 0.1 + (row % 5) * 0.4
        options = {
            "plain": {},
            "T": {"temperature": T},
            "greedy": {"temperature": 0.0},
            "everything": {
                "temperature": T,
                "bias": torch.randn(V, device="cuda"),
                "mask": torch.rand(B, V, device="cuda") < 0.9,
                "soft_cap": 20.0,
            },
        }[form]
        draws: list[Sample] = []
        for kernel, noise in (*((k, "group") for k in kernels()), ("portable", "token")):
            drawn = flash_sample(
                hidden, weight, seed=counter(3), num_samples=5, noise=noise, kernel=kernel,
                return_logprob=True, return_logz=True, return_entropy=True, return_rank=True,
                return_top=20, **options,
            )  # fmt: skip
            for scorer in kernels():
                fields = {"return_entropy": True, "return_rank": True, "kernel": scorer, **options}
                result = score(hidden, weight, drawn.tokens, **fields)
                assert result.valid.all()
                case = (V, B, kernel, noise, scorer)
                assert same_bits(result.logprob, drawn.logprob), case
                assert same_bits(result.logz, drawn.logz), case
                assert same_bits(result.entropy, drawn.entropy), case
                assert torch.equal(result.rank, drawn.rank), case
                top = score(hidden, weight, drawn.top_tokens, **fields)
                assert same_bits(top.logprob, drawn.top_logprob), case
                ties = top.logprob[:, 1:] == top.logprob[:, :-1]
                place = torch.arange(20, device="cuda").expand_as(top.rank)
                assert (top.rank <= place).all() and (top.rank[:, 1:] == place[:, 1:])[~ties].all()
            draws.append(drawn)
        assert all(same_bits(each.logz, draws[0].logz) for each in draws)


@pytest.mark.parametrize(
    "dtype, sizes", [(torch.bfloat16, (1, 64, 129)), (torch.float16, (64,))], ids=str
)
def test_a_token_of_the_same_logit_does_not_count(dtype, sizes):
    """One bit between a target's logit and that of the pass would count its twin, or more."""
    D, half = 512, 20 * 512  # twins begin their sums at the same column
    for B in sizes:
        hidden, weight = problem(B, half, D, dtype)
        weight = weight.repeat(2, 1)
        options = {"return_rank": True, "return_top": 20}
        drawn = flash_sample(hidden, weight, seed=counter(3), num_samples=5, **options)
        for kernel in kernels():
            top = score(hidden, weight, drawn.top_tokens, return_rank=True, kernel=kernel)
            assert torch.equal(top.rank[:, ::2], top.rank[:, 1::2]), (B, kernel)
            result = score(hidden, weight, drawn.tokens, return_rank=True, kernel=kernel)
            assert torch.equal(result.rank, drawn.rank), (B, kernel)


def test_the_bits_do_not_depend_on_the_batch_the_row_or_the_tiles():
    hidden, weight = problem(300, 32_001, 1024)
    targets = torch.randint(0, 32_001, (300,), device="cuda")
    whole = score(hidden, weight, targets, temperature=0.7)
    tiles = [
        TileConfig(16, 128, 64, 128, True, False, 4, 3, 1),
        TileConfig(64, 256, 64, 32, False, True, 8, 3, 1),
    ]
    for B, first in ((1, 299), (5, 17), (64, 100), (130, 3)):
        rows = slice(first, first + B)
        for more in (
            *({"kernel": kernel} for kernel in kernels()),
            *({"config": c} for c in tiles),
        ):
            part = score(hidden[rows].contiguous(), weight, targets[rows], temperature=0.7, **more)
            assert same_bits(part.logprob, whole.logprob[rows]), (B, first, more)
            assert same_bits(part.logz, whole.logz[rows]), (B, first, more)


def test_a_captured_score_reads_its_targets_at_each_replay():
    hidden, weight = problem(33, 5003, 256)
    targets = torch.randint(0, 5003, (33, 2), device="cuda")
    replay = capture(lambda h, t, _: score(h, weight, t).logprob, hidden, targets, targets)
    for _ in range(3):
        targets.random_(0, 5003)
        assert same_bits(replay(), score(hidden, weight, targets).logprob)

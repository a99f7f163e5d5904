"""Rules of all public calls.

The same bits under torch.autocast and any default dtype and device of torch; an empty result for
no rows; errors that name the argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from flash_sample_cases import problem
from tiers import full
from torch import Tensor

from fsbench import kernels, reference
from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import Penalties, TokenHistory

B, V, D = 3, 96, 32
SEED = [11, 12, 13]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def surroundings(device: str) -> dict[str, Any]:
    return {
        "autocast to bf16": lambda: torch.autocast(device, torch.bfloat16),
        "autocast to fp16": lambda: torch.autocast(device, torch.float16),
        "default bf16": lambda: default_dtype(torch.bfloat16),
        "default fp64": lambda: default_dtype(torch.float64),
        "meta": lambda: torch.device("meta"),  # the default device
    }


def drafts(hidden: Tensor, weight: Tensor, head: object = None, **options: Any) -> object:
    ids = torch.arange(0, V, 2, device=hidden.device)
    rows = weight[::2].contiguous()
    vocabulary = kernels.prepare_draft_vocabulary(ids, V)
    return kernels.draft_sample(hidden, head(rows) if head else rows, vocabulary, **options)


def verified(hidden: Tensor, weight: Tensor, **options: Any) -> object:
    tokens = kernels.flash_sample(hidden, weight, **options).tokens
    sampled, proposed = tokens.repeat_interleave(3), tokens[:, None].repeat(1, 2)
    return *kernels.verify_drafts(sampled, proposed), *kernels.step_noise(tokens, tokens, 2)


def scored(hidden: Tensor, weight: Tensor, **options: Any) -> object:
    targets = torch.arange(len(hidden), device=hidden.device)
    return kernels.score(hidden, weight, targets, return_entropy=True, return_rank=True, **options)


def penalized(hidden: Tensor, **options: Any) -> Penalties:
    history = TokenHistory.from_tokens(
        [[1, 2]] * len(hidden), [[3, 3]] * len(hidden), 8, hidden.device
    )
    return Penalties(history, 1.3, 0.7, 0.1)


CALLS: dict[str, Any] = {
    "flash_sample": lambda h, w, o: kernels.flash_sample(
        h, w, num_samples=2, return_logprob=True, return_logz=True, return_entropy=True,
        return_rank=True, return_top=3, **o,
    ),
    "flash_sample, token noise": lambda h, w, o: kernels.flash_sample(h, w, noise="token", **o),
    "flash_sample, screened": lambda h, w, o: kernels.flash_sample(
        h, kernels.prepare_head(w), **o
    ),
    "flash_sample, quantized": lambda h, w, o: kernels.flash_sample(
        h, kernels.quantize_head(w), return_logprob=True, **o
    ),
    "truncated_sample": lambda h, w, o: kernels.truncated_sample(
        h, w, top_k=9, top_p=0.7, min_p=0.01, penalties=penalized(h), return_kept=True,
        return_logprob=True, return_kept_logprob=True, return_rank=True, return_support=5,
        return_top=3, logprob_temperature=0.9, **o,
    ),
    "truncated_sample, screened": lambda h, w, o: kernels.truncated_sample(
        h, kernels.prepare_head(w), top_k=5, top_p=0.7, **o
    ),
    "screened_sample": lambda h, w, o: kernels.screened_sample(h, kernels.prepare_head(w), **o),
    "draft_sample": lambda h, w, o: drafts(h, w, **o),
    "draft_sample, screened": lambda h, w, o: drafts(h, w, kernels.prepare_head, **o),
    "draft_sample, quantized and filtered": lambda h, w, o: drafts(
        h, w, kernels.quantize_head, top_p=0.7, min_p=0.01, penalties=penalized(h), **o
    ),
    "verify_drafts": lambda h, w, o: verified(h, w, **o),
    "prepare_head": lambda h, w, o: kernels.prepare_head(w).copy,
    "quantize_head": lambda h, w, o: vars(kernels.quantize_head(w)).values(),
    "quantize_head, fp8": lambda h, w, o: vars(
        kernels.quantize_head(w, torch.float8_e4m3fn, per_row=False)
    ).values(),
    "describe": lambda h, w, o: kernels.describe(h, w, why=True),
}  # fmt: skip
SCORES = {"score": lambda h, w, o: scored(h, w, **{k: v for k, v in o.items() if k != "seed"})}


def options_of(device: str, rows: bool) -> dict[str, Any]:
    """Return options with values that bf16 cannot hold: numbers, or of each row and logit."""
    T = torch.tensor([0.7, 1.3, 0.0], dtype=torch.float32, device=device) if rows else 0.7
    options: dict[str, Any] = {"temperature": T, "seed": torch.tensor(SEED, device=device)}
    if rows:
        options["bias"] = torch.linspace(-1, 1, B * V, dtype=torch.float32, device=device).view(
            B, V
        )
        options["mask"] = torch.arange(B * V, device=device).view(B, V) % 5 > 0
        options["soft_cap"] = 7.3
    return options


def tensors_of(result: object) -> list[object]:
    if isinstance(result, str):
        return [result]
    return [x.detach().clone() for x in result if isinstance(x, Tensor)]  # type: ignore[attr-defined]


BF16, FP16 = torch.bfloat16, torch.float16  # on a CPU the reference, and the interpreter
FORMS = [
    *(("cpu", BF16, True), ("cpu", FP16, False), full("cpu", FP16, True)),
    *(pytest.param("cuda", BF16, rows, marks=pytest.mark.gpu) for rows in (False, True)),
]
"""(device, dtype, whether options have values of each row)."""


@pytest.mark.parametrize(("device", "dtype", "rows"), FORMS)
@pytest.mark.parametrize("name", [*CALLS, *SCORES])
def test_a_public_call_returns_the_same_bits_anywhere(name, device, dtype, rows):
    hidden, weight = (x.to(device) for x in problem(B, V, D, dtype))
    call = (CALLS | SCORES)[name]
    options = options_of(device, rows)
    expected = tensors_of(call(hidden, weight, options))
    for where, enter in surroundings(device).items():
        with enter():
            got = tensors_of(call(hidden, weight, options))
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert type(one) is type(other)
            if isinstance(one, Tensor):
                assert one.dtype == other.dtype, where
                same = torch.equal(*(x.double().nan_to_num(7e9) for x in (one, other)))
                assert same, (where, one, other)
            else:
                assert one == other


def logits_in(dtype: torch.dtype) -> Tensor:
    return problem(B, V, D)[1].T[:B, :V].contiguous().to(dtype)


COUNTER = torch.tensor([3])
COUNTS = torch.arange(B * V).view(B, V) % 3


REFERENCE = {
    "expect": lambda y: reference.expect(y, COUNTER, COUNTER, 0.7),
    "expect, groups": lambda y: reference.expect(
        y, COUNTER, COUNTER, 0.7, "group"
    ),
    "truncate": lambda y: reference.truncate(y, 0.7, top_k=9, top_p=0.7, min_p=0.01),
    "filtered_probabilities": lambda y: [
        reference.filtered_probabilities(y, reference.truncate(y, 0.7, top_p=0.9), 0.7)
    ],
    "penalized": lambda y: [
        reference.penalized(
            y, COUNTS, COUNTS, repetition=1.3, presence=0.7, frequency=0.1
        )
    ],
    "log_partition": lambda y: [reference.log_partition(y, 0.7)],
    "largest": lambda y: reference.largest(y, 4, 0.7),
    "processed_logits": lambda y: [
        reference.processed_logits(y, soft_cap=7.3, bias=y.float(), mask=y > -1)
    ],
    "coupled_acceptance": lambda y: [
        reference.coupled_acceptance(y.softmax(1), (0.7 * y.double()).softmax(1))
    ],
    "matmul_error": lambda y: [y.new_tensor(reference.matmul_error(y, y))],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", REFERENCE)
def test_the_reference_returns_the_same_bits_anywhere(name, dtype):
    y = logits_in(dtype)
    expected = tensors_of(REFERENCE[name](y))
    for where, enter in surroundings("cpu").items():
        with enter():
            got = tensors_of(REFERENCE[name](y))
        for one, other in zip(got, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), where


@pytest.mark.parametrize(("device", "dtype", "rows"), FORMS)
@pytest.mark.parametrize("name", [name for name in [*CALLS, *SCORES] if "_head" not in name])
def test_no_rows_have_an_empty_result(name, device, dtype, rows):
    hidden, weight = (x.to(device) for x in problem(B, V, D, dtype))
    options = options_of(device, rows)
    if name == "describe":
        with pytest.raises(InvalidArgument, match="hidden: expected a non-empty matrix"):
            kernels.describe(hidden[:0], weight)
        return
    empty = {k: x[:0] if isinstance(x, Tensor) else x for k, x in options.items()}
    expected = (CALLS | SCORES)[name](hidden, weight, options)
    result = (CALLS | SCORES)[name](hidden[:0], weight, empty)
    for one, other in zip(expected, result, strict=True):
        assert (one is None) == (other is None) or name.startswith(("screened", "truncated"))
        if one is not None and other is not None:
            assert other.dtype == one.dtype
            assert len(other) == 0 and other.shape[1:] == one.shape[1:]


def nested(like: Tensor) -> Tensor:
    return torch.nested.nested_tensor([like[0], like[1]])


ODD = {
    "csr": lambda x: x.to_sparse_csr(),
    "coo": lambda x: x.to_sparse(),
    "nested": nested,
    "meta": lambda x: x.to("meta"),
}
"""Tensors without the memory of a matrix."""


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_that_is_not_dense_is_refused_by_name(kind):
    hidden, weight = problem(B, V, D)
    seed, odd = torch.tensor([3]), ODD[kind]
    calls = {
        "hidden": lambda: kernels.flash_sample(odd(hidden), weight, seed=seed),
        "weight": lambda: kernels.flash_sample(hidden, odd(weight), seed=seed),
        "bias": lambda: kernels.flash_sample(
            hidden, weight, seed=seed, bias=odd(torch.zeros(B, V))
        ),
        "targets": lambda: kernels.score(hidden, weight, odd(torch.ones(B, 2).long())),
        "drafts": lambda: kernels.verify_drafts(torch.ones(9).long(), odd(torch.ones(3, 2).long())),
        "token_ids": lambda: kernels.prepare_draft_vocabulary(odd(torch.ones(2, 2).long()), 9),
    }
    if kind != "meta":
        calls["weight of prepare_head"] = lambda: kernels.prepare_head(odd(weight))
        calls["weight of quantize_head"] = lambda: kernels.quantize_head(odd(weight))
    else:  # their device is that of the meta tensor
        del calls["drafts"], calls["token_ids"]
    for name, call in calls.items():
        with pytest.raises((InvalidArgument, InvalidType), match=f"^{name.split()[0]}: expected"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, w: TokenHistory(3, 4, "nonsense"), "device: expected one of this machine"),
        (lambda h, w: TokenHistory(3, 4, 7.5), "device: expected a torch.device or its name"),
        (lambda h, w: kernels.describe(h, w, top_k="x"), "top_k: expected an integer; got str"),
        (lambda h, w: kernels.DraftVocabulary([1, 2], 96), "token_ids: expected a tensor"),
        (
            lambda h, w: kernels.DraftVocabulary(torch.tensor([1]), "x"),
            "vocab_size: expected an integer",
        ),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises((InvalidArgument, InvalidType), match=message):
        call(*problem(B, V, D))


COUNTERS = {
    "integer": -3,
    "unsigned": 2**64 - 3,
    "int32": torch.tensor([-3], dtype=torch.int32),
    "uint64": torch.tensor([2**64 - 3], dtype=torch.uint64),
}
"""Forms of a seed whose 64 bits are those of int64 -3."""


@pytest.mark.parametrize("form", COUNTERS)
@pytest.mark.parametrize(
    "name", ["flash_sample", "screened_sample", "truncated_sample", "draft_sample"]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_seed_or_an_offset_of_another_type_has_the_same_bits(name, form, device):
    hidden, weight = (x.to(device) for x in problem(B, V, D, torch.bfloat16))
    tensor = torch.tensor([-3], device=device)
    other = COUNTERS[form]
    other = other.to(device) if isinstance(other, Tensor) else other
    call = CALLS[name]
    expected, seeded, stepped = (
        tensors_of(call(hidden, weight, {"temperature": 3.0, "seed": seed, "offset": offset}))
        for seed, offset in ((tensor, tensor), (other, tensor), (tensor, other))
    )
    for one, by_seed, by_offset in zip(expected, seeded, stepped, strict=True):
        assert one.equal(by_seed) and one.equal(by_offset)

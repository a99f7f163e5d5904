"""The gradient of score, against autograd in float64, and the memory that it takes."""

from __future__ import annotations

import weakref

import pytest
import torch
from flash_sample_cases import SEED, counter, normal_logits, packed, problem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsbench import reference
from fsbench.kernels import score
from fsbench.kernels.launch.request import Request
from fsbench.kernels.scoring import gradient
from fsbench.kernels.scoring.slopes import of_chunk, slopes, slopes_by_torch

pytestmark = pytest.mark.usefixtures("one_thread")

B, V, D = 70, 333, 24


def calls() -> dict[str, dict]:
    hidden, weight = problem(B, V, D, sigma=3.0)
    plain = {"hidden": hidden, "weight": weight}
    T = torch.linspace(0.3, 2, B)
    T[7] = 0.0
    mask = normal_logits(B, 290) > -1
    return {
        "plain": plain,
        "T": {**plain, "temperature": T},
        "soft cap": {**plain, "soft_cap": 4.0, "temperature": 0.6},
        "bias": {**plain, "bias": normal_logits(1, V)[0]},
        "everything": {
            **plain,
            "vocab_size": 290,
            "temperature": T,
            "soft_cap": 5.0,
            "bias": normal_logits(B, 290),
            "mask": packed(mask),
        },
        "mask": {**plain, "vocab_size": 290, "mask": mask},
    }


def by_float64(targets, d_logprob, d_logz, call, d_entropy=None) -> list[torch.Tensor]:
    """The gradients of hidden, weight and bias by torch's own autograd."""
    names = [name for name in ("hidden", "weight", "bias") if name in call]
    exact = {name: call[name].double().requires_grad_() for name in names}
    logits = exact["hidden"] @ exact["weight"][: call.get("vocab_size")].T
    logits = reference.processed_logits(
        logits, soft_cap=call.get("soft_cap"), bias=exact.get("bias"), mask=call.get("mask")
    )
    T = torch.as_tensor(call.get("temperature", 1.0)).double().reshape(-1, 1)
    scaled = logits / torch.where(T == 0, 1.0, T)
    logz = scaled.logsumexp(1)
    logprob = scaled.gather(1, targets.clamp_min(0)) - logz[:, None]
    loss = (logprob.where(targets >= 0, 0.0) * d_logprob).sum() + (logz * d_logz).sum()
    if d_entropy is not None:
        allowed = scaled > -torch.inf
        logp = scaled.where(allowed, 0.0) - logz[:, None]
        loss = loss - ((logp.exp() * logp).where(allowed, 0.0).sum(1) * d_entropy).sum()
    return list(torch.autograd.grad(loss, list(exact.values())))


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [32, 1024, "256 by the kernel"])
@pytest.mark.parametrize("name", calls())
def test_gradients_are_those_of_float64(name, chunk, with_entropy, monkeypatch):
    """Over several chunks of rows and tokens, and in one; every fifth target is ignored."""
    differentiable = ["hidden", "weight", "bias"]
    if isinstance(chunk, str):
        monkeypatch.setattr(gradient, "slopes_by_torch", slopes)
        differentiable.remove("bias")
        chunk = 256
    monkeypatch.setattr(gradient, "AT_ONCE", chunk)
    call = calls()[name]
    draw = torch.Generator().manual_seed(3)
    size = call.get("vocab_size", V)
    targets = torch.randint(0, size, (B, 3), generator=draw)
    if "mask" in call:  # a forbidden target has -inf, which is no loss
        allowed = reference.unpacked(call["mask"], size)
        targets = targets.where(allowed.gather(1, targets), allowed.int().argmax(1)[:, None])
    targets[::5] = -100
    d_logprob = torch.randn(B, 3, generator=draw)
    d_logz = torch.randn(B, generator=draw)
    d_entropy = torch.randn(B, generator=draw) if with_entropy else None
    given = {
        key: x.clone().requires_grad_() if key in differentiable else x for key, x in call.items()
    }
    found = score(targets=targets, return_entropy=with_entropy, return_rank=True, **given)
    assert not found.rank.requires_grad
    loss = (found.logprob * d_logprob).sum() + (found.logz * d_logz).sum()
    if found.entropy is not None:
        loss = loss + (found.entropy * d_entropy).sum()
    loss.backward()
    wanted = by_float64(targets, d_logprob, d_logz, call, d_entropy)
    leaves = [given[key] for key in differentiable if key in given]
    # p log p errs with the logits, which are in fp32 and up to 40 here.
    near = {"rtol": 1e-4, "atol": 1e-4 if with_entropy else 1e-5}
    for leaf, right in zip(leaves, wanted[: len(leaves)], strict=True):
        torch.testing.assert_close(leaf.grad.double(), right, **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("bias", ["no bias", "bias", "bias of rows"])
@pytest.mark.parametrize("form", ["no mask", "bools", "words"])
def test_the_kernel_computes_what_torch_computes(form, bias, soft_cap, dtype):
    """The last tokens of an odd vocabulary, of a chunk that ends in a word of the mask."""
    rows, tokens = slice(32, 32 + 9), slice(1024, 1024 + 1061)
    B, V, n, first = 50, tokens.stop, 5, tokens.start
    draw = torch.Generator().manual_seed(4)
    mask = torch.rand(B, V, generator=draw) < 0.8
    request = Request(
        *(torch.empty(x, 8) for x in (B, V)), SEED, None, 1.0, soft_cap,
        {"no bias": None, "bias": normal_logits(1, V)[0]}.get(bias, normal_logits(B, V)),
        {"no mask": None, "bools": mask, "words": packed(mask)}[form], V, n, "given",
    )  # fmt: skip
    targets = torch.randint(first, V, (B, n), generator=draw)
    targets[:, 1] = targets[:, 0]
    targets[:, 2] = counter(-100, -1, V, first - 1, V + 5)[torch.arange(B) % 5]
    chunk = of_chunk(request._replace(seed=targets), rows, tokens)
    logits = torch.randn(9, 1100, generator=draw).mul_(3)[:, :1061]
    logits[0, 3], logits[1, 5], logits[2] = torch.inf, torch.nan, -torch.inf
    numbers = torch.rand(9, 5, generator=draw) + 0.2
    numbers[:, 1] += 8  # log Z
    numbers[:4, 1] = torch.tensor([torch.inf, torch.nan, -torch.inf, torch.nan])
    g = torch.randn(9, n, generator=draw)
    for width in (3, 5):
        found, wanted = (torch.full((9, 1100), 7.0, dtype=dtype) for _ in range(2))
        given = (chunk, first, numbers[:, :width].contiguous(), g)
        slopes(logits, *given, found[:, :1061])
        slopes_by_torch(logits.clone(), *given, wanted[:, :1061])
        assert wanted[:4, :1061].abs().max() == 0 and wanted[4:, :1061].abs().max() > 0.1
        near = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found, wanted, rtol=near, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_have_their_dtype_and_precision(dtype):
    hidden, weight = problem(B, V, D, dtype, sigma=3.0)
    targets = torch.arange(B)[:, None] % V
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    score(hidden, weight, targets).logprob.sum().backward()
    exact = {"hidden": hidden.detach(), "weight": weight.detach()}
    wanted = by_float64(targets, torch.ones(B, 1), torch.zeros(B), exact)
    for leaf, right in zip(leaves, wanted, strict=True):
        assert leaf.grad.dtype == dtype
        error = (leaf.grad.double() - right).norm() / right.norm()
        assert error < 2 * torch.finfo(dtype).eps


def test_what_has_no_log_probability_has_no_gradient_and_disturbs_no_other():
    hidden, weight = problem(6, 100, D)
    hidden[1, 3], hidden[2, 0] = torch.nan, torch.inf
    targets = counter(5, 6, 7, 100, -100, 99)
    T = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, torch.nan])
    found = score(
        h := hidden.requires_grad_(), w := weight.requires_grad_(), targets, temperature=T
    )
    (found.logprob.nansum() + 0 * found.logz.nansum()).backward()
    assert h.grad[1:].abs().max() == 0
    alone = score(a := hidden[:1].detach().requires_grad_(), b := weight.detach().requires_grad_(),
                  targets[:1])  # fmt: skip
    alone.logprob.sum().backward()
    torch.testing.assert_close(h.grad[:1], a.grad)
    torch.testing.assert_close(w.grad, b.grad)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight = problem(3, 50, D)
    found = score(hidden, weight.requires_grad_(), counter(1, 2, 3))
    assert not found.valid.requires_grad
    found.logprob.sum().backward()
    assert weight.grad is not None and hidden.grad is None
    with torch.no_grad():
        assert not score(hidden, weight, counter(1, 2, 3)).logprob.requires_grad


def test_the_gradient_under_torch_compile_is_that_of_an_eager_call():
    leaves = [x.requires_grad_() for x in problem(5, 50, D)]

    def loss(hidden, weight):
        return score(hidden, weight, torch.arange(5), soft_cap=4.0).logprob.sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for one, other in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        torch.testing.assert_close(one, other)


class Held(TorchDispatchMode):
    """The most bytes that tensors made under it held at one time."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, list[int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if is_tensor(x)}
        for tensor in filter(is_tensor, tree_iter(out)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                if key in given:
                    continue
                self.sizes[key] = [0, storage.nbytes()]
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
            self.sizes[key][0] += 1
            weakref.finalize(tensor, self.drop, key)
        return out

    def drop(self, key):
        self.sizes[key][0] -= 1
        if self.sizes[key][0] == 0:
            self.now -= self.sizes.pop(key)[1]


def is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def test_the_count_of_held_bytes_sees_what_is_alive_at_one_time():
    with Held() as held:
        for _ in range(3):
            a = torch.zeros(1000)
            b = a[:10] + 1
            del a
            c = b * 2
            del b, c
    assert 4000 < held.most <= 4000 + 4 * 100 and held.now == 0


@pytest.mark.parametrize(
    ("rows", "D", "by_kernel", "dtype"),
    [
        *((16_384, D, True, torch.bfloat16) for D in (1024, 4096, 8192)),
        (16_384, 4096, True, torch.float32),
        (4096, 4096, False, torch.bfloat16),  # many launches, which take the test its time
    ],
)
def test_no_more_than_64_mb_are_held_beside_the_gradients(rows, D, by_kernel, dtype, monkeypatch):
    """V = 151,936, without numbers: what is allocated depends on shapes alone."""
    launched = []
    monkeypatch.setattr(gradient, "slopes", lambda logits, *_: launched.append(logits.shape))
    tokens = 151_936
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, D, dtype=dtype) for n in (rows, tokens))
        targets = torch.empty(rows, 1, dtype=torch.int64)
        logz, d_logprob, bias = torch.empty(rows), torch.empty(rows, 1), torch.empty(tokens)
    request = Request(
        hidden, weight, SEED, None, 1.0, 30.0, bias, None, tokens, 1, "given"
    )._replace(seed=targets)
    with Held() as held:
        wanted = (True, True, not by_kernel)
        found = gradient.gradients(request, logz, d_logprob, logz, wanted=wanted)
    results = sum(x.nbytes for x in found if x is not None)
    assert results == dtype.itemsize * D * (rows + tokens) + (0 if by_kernel else bias.nbytes)
    assert 4 * gradient.AT_ONCE**2 < held.most - results <= 64e6
    if by_kernel and D <= 4096 and dtype == torch.bfloat16:
        assert launched[0] == (2048, 2048) and len(launched) == 8 * 75
    assert bool(launched) == by_kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_by_torch_func_is_that_of_backward(dtype):
    inputs = [*problem(3, 96, 32, dtype), torch.linspace(-1, 1, 96, dtype=dtype)]
    targets = torch.tensor([1, 2, -100])

    def loss(hidden, weight, bias):
        found = score(hidden, weight, targets, bias=bias, temperature=0.7, return_entropy=True)
        return found.logprob.sum() + found.entropy.sum() + found.logz.sum()

    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    for one, leaf in zip(found, leaves, strict=True):
        assert torch.equal(one, leaf.grad)

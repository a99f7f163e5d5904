"""The gradient of score, against autograd in float64, and the memory that it takes."""

from __future__ import annotations

import weakref

import pytest
import torch
from flash_sample_cases import SEED, counter, normal_logits, packed, problem
from tiers import full
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsbench import reference
from fsbench.kernels import score
from fsbench.kernels.launch.request import Request
from fsbench.kernels.scoring import gradient

pytestmark = pytest.mark.usefixtures("one_thread")

B, V, D = 40, 133, 24


def calls() -> dict[str, dict]:
    hidden, weight = problem(B, V, D, sigma=3.0)
    plain = {"hidden": hidden, "weight": weight}
    T = torch.linspace(0.3, 2, B)
    T[7] = 0.0
    mask = normal_logits(B, 90) > -1
    return {
        "plain": plain,
        "bias": {**plain, "bias": normal_logits(1, V)[0], "temperature": T},
        "everything": {
            **plain,
            "vocab_size": 90,
            "temperature": T,
            "soft_cap": 5.0,
            "bias": normal_logits(B, 90),
            "mask": packed(mask),
        },
        "mask": {**plain, "vocab_size": 90, "mask": mask, "soft_cap": 4.0, "temperature": 0.6},
    }


def by_float64(targets, d_logprob, d_logz, call, d_entropy=None) -> list[torch.Tensor]:
    """Return the gradients of hidden, weight and bias by torch's autograd."""
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
@pytest.mark.parametrize("name", calls())
def test_gradients_are_those_of_float64(name, with_entropy, monkeypatch):
    """Over several chunks of rows and tokens, or in one; every fifth target is ignored."""
    differentiable = ["hidden", "weight", "bias"]
    if name != "plain":
        monkeypatch.setattr(gradient, "CHUNK", 32)
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
    args = {
        key: x.clone().requires_grad_() if key in differentiable else x for key, x in call.items()
    }
    result = score(targets=targets, return_entropy=with_entropy, return_rank=True, **args)
    assert not result.rank.requires_grad
    loss = (result.logprob * d_logprob).sum() + (result.logz * d_logz).sum()
    if result.entropy is not None:
        loss = loss + (result.entropy * d_entropy).sum()
    loss.backward()
    expected = by_float64(targets, d_logprob, d_logz, call, d_entropy)
    leaves = [args[key] for key in differentiable if key in args]
    # The error of p log p grows with the logits, which are in fp32 and up to 40 here.
    near = {"rtol": 1e-4, "atol": 1e-4 if with_entropy else 1e-5}
    for leaf, right in zip(leaves, expected[: len(leaves)], strict=True):
        torch.testing.assert_close(leaf.grad.double(), right, **near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_16_bits_have_their_dtype_and_precision(dtype):
    hidden, weight = problem(B, V, D, dtype, sigma=3.0)
    targets = torch.arange(B)[:, None] % V
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    score(hidden, weight, targets).logprob.sum().backward()
    exact = {"hidden": hidden.detach(), "weight": weight.detach()}
    expected = by_float64(targets, torch.ones(B, 1), torch.zeros(B), exact)
    for leaf, right in zip(leaves, expected, strict=True):
        assert leaf.grad.dtype == dtype
        error = (leaf.grad.double() - right).norm() / right.norm()
        assert error < 2 * torch.finfo(dtype).eps


def test_a_target_without_a_log_probability_has_gradient_0_and_disturbs_no_other():
    hidden, weight = problem(6, 100, D)
    hidden[1, 3], hidden[2, 0] = torch.nan, torch.inf
    targets = counter(5, 6, 7, 100, -100, 99)
    T = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, torch.nan])
    result = score(
        h := hidden.requires_grad_(), w := weight.requires_grad_(), targets, temperature=T
    )
    (result.logprob.nansum() + 0 * result.logz.nansum()).backward()
    assert h.grad[1:].abs().max() == 0
    alone = score(a := hidden[:1].detach().requires_grad_(), b := weight.detach().requires_grad_(),
                  targets[:1])  # fmt: skip
    alone.logprob.sum().backward()
    torch.testing.assert_close(h.grad[:1], a.grad)
    torch.testing.assert_close(w.grad, b.grad)


def test_only_tensors_that_need_a_gradient_get_one():
    hidden, weight = problem(3, 50, D)
    result = score(hidden, weight.requires_grad_(), counter(1, 2, 3))
    assert not result.valid.requires_grad
    result.logprob.sum().backward()
    assert weight.grad is not None and hidden.grad is None
    with torch.no_grad():
        assert not score(hidden, weight, counter(1, 2, 3)).logprob.requires_grad


@pytest.mark.full
def test_the_gradient_under_torch_compile_is_that_of_an_eager_call():
    leaves = [x.requires_grad_() for x in problem(5, 50, D)]

    def loss(hidden, weight):
        return score(hidden, weight, torch.arange(5), soft_cap=4.0).logprob.sum()

    eager = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for one, other in zip(torch.autograd.grad(compiled(*leaves), leaves), eager, strict=True):
        torch.testing.assert_close(one, other)


class PeakBytes(TorchDispatchMode):
    """Count the most bytes that tensors made in the mode hold at one time."""

    def __init__(self):
        super().__init__()
        self.sizes: dict[int, list[int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if is_tensor(x)}
        for tensor in filter(is_tensor, tree_iter(out)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                if key in inputs:
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


@pytest.mark.parametrize(
    ("D", "dtype", "options"),
    [
        (1024, torch.bfloat16, {}),
        full(4096, torch.float32, {"entropy": True}),
        full(8192, torch.bfloat16, {"soft_cap": 30.0}),
        full(
            4096,
            torch.bfloat16,
            {"soft_cap": 30.0, "bias": torch.float32, "mask": torch.int32, "entropy": True},
        ),
        (4096, torch.float16, {"mask": torch.bool}),
    ],
    ids=str,
)
def test_no_more_than_64_mb_are_held_in_addition_to_the_gradients(D, dtype, options):
    """V = 151,936, on the meta device: allocations depend on shapes alone."""
    rows, tokens = 4096, 151_936
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, D, dtype=dtype) for n in (rows, tokens))
        targets = torch.empty(rows, 1, dtype=torch.int64)
        logz, d_logprob = torch.empty(rows), torch.empty(rows, 1)
        bias = torch.empty(tokens) if "bias" in options else None
        mask = None
        if "mask" in options:
            width = tokens if options["mask"] == torch.bool else tokens // 32
            mask = torch.empty(rows, width, dtype=options["mask"])
    request = Request(
        hidden, weight, SEED, None, 1.0, options.get("soft_cap"), bias, mask, tokens, 1, "target"
    )._replace(seed=targets)
    entropy = (logz, logz) if "entropy" in options else None
    with PeakBytes() as held:
        gradients = gradient.gradients(
            request, logz, d_logprob, logz, entropy, (True, True, bias is not None)
        )
    results = sum(x.nbytes for x in gradients if x is not None)
    assert results == dtype.itemsize * D * (rows + tokens) + (0 if bias is None else bias.nbytes)
    assert 25e6 < held.most - results <= 64e6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_by_torch_func_is_that_of_backward(dtype):
    inputs = [*problem(3, 96, 32, dtype), torch.linspace(-1, 1, 96, dtype=dtype)]
    targets = torch.tensor([1, 2, -100])

    def loss(hidden, weight, bias):
        result = score(hidden, weight, targets, bias=bias, temperature=0.7, return_entropy=True)
        return result.logprob.sum() + result.entropy.sum() + result.logz.sum()

    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss(*leaves).backward()
    for one, leaf in zip(gradients, leaves, strict=True):
        assert torch.equal(one, leaf.grad)

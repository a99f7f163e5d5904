"""`score`: log-probabilities of given tokens, computed by the kernels of flash_sample."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.tensors import check_dense, check_no_gradients, check_tensor
from fsbench.kernels.checks.values import MAX_SAMPLES, check_flag, check_kernel
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.fused.api import carry_out
from fsbench.kernels.launch.quantized import QuantizedHead
from fsbench.kernels.launch.request import Request, checked_request
from fsbench.kernels.launch.result import Sample, Score
from fsbench.kernels.shard.vocab_shard import VocabShard

L2_BYTES = 32 << 20
"""Bytes of hidden in a launch, about: every tile of the weight reads all of them from the L2."""


def score(
    hidden: Tensor,
    weight: Tensor | VocabShard | QuantizedHead,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    vocab_size: int | None = None,
    return_entropy: bool = False,
    return_rank: bool = False,
    kernel: str = "auto",
    config: TileConfig | HopperConfig | None = None,
) -> Score:
    """Return log softmax(logits / temperature) at the targets, without storing the logits.

    The logits are hidden @ weight.T. The result has the same bits as flash_sample(...,
    return_logprob=True) for the same token, with either noise, any kernel, tile shape and batch,
    in any row, and over any number of GPUs: it depends only on the row's logits and temperature
    (docs/guide/log-probabilities.md).

    Args:
        hidden, weight, temperature, soft_cap, bias, mask, vocab_size, kernel, config: as in
            flash_sample. A greedy row (T = 0) is scored at T = 1.
        targets: int64 [B] or [B, n], contiguous. Target -100 is ignored: its log-probability is 0.
        return_entropy, return_rank: fill these fields of the result. Ranks are not available with a
            VocabShard.

    Returns:
        Score. A forbidden token has -inf. A token without a log-probability has NaN, and its
        `valid` is False. The host does not wait for the GPU.

    A call is one launch for every four targets of a row and every 32 MB of hidden, and a small
    launch before them for ranks. It can be captured in a CUDA graph and compiled.

    The result has no gradient, so while autograd is on, a tensor that requires one is refused: call
    score under torch.no_grad(), and take the gradient from another loss
    (docs/guide/log-probabilities.md).

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device, layout
            or range, or one that requires a gradient, or a kernel that cannot run here. Nothing has
            been launched.
        CaptureError: the workspaces for captures are used up.
    """
    check_dense("targets", targets)
    n = targets.shape[1] if targets.ndim == 2 else 1
    if not 1 <= n <= MAX_SAMPLES:
        raise InvalidArgument(
            f"targets: expected 1 to {MAX_SAMPLES} of each row; got {list(targets.shape)}"
        )
    request = checked_request(
        hidden,
        weight,
        seed=torch.empty(1, dtype=torch.int64, device=getattr(hidden, "device", None)),
        offset=None,
        temperature=temperature,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        num_samples=n,
        may_be_sharded=True,
        may_be_quantized=True,
    )
    B, device = request.hidden.shape[0], request.hidden.device
    shapes = [(B,), (B, n)] if targets.ndim == 2 else [(B,)]
    check_tensor("targets", targets, [torch.int64], shapes, device)
    kernel = check_kernel(kernel, config)
    check_flag("return_entropy", return_entropy)
    if check_flag("return_rank", return_rank) and request.shard is not None:
        raise InvalidArgument("return_rank: expected False with a VocabShard; got True")
    request = request._replace(seed=targets.view(B, n), noise="target")
    check_no_gradients(zip(Request._fields, request, strict=True))
    result = _compute(
        request, has_entropy=return_entropy, has_rank=return_rank, kernel=kernel, config=config
    )
    shaped = {
        name: x.view_as(targets)
        for name, x in result._asdict().items()
        if name in ("logprob", "rank", "valid") and x is not None
    }
    return result._replace(**shaped)


def _compute(
    request: Request,
    *,
    has_entropy: bool,
    has_rank: bool,
    kernel: str,
    config: TileConfig | HopperConfig | None,
) -> Score:
    """Return the Score of a request with targets [B, n]."""
    (B, n), device = request.seed.shape, request.hidden.device
    logprob = torch.empty(B, n, dtype=torch.float32, device=device)
    logz = torch.empty(B, dtype=torch.float32, device=device)
    entropy = torch.empty(B, dtype=torch.float32, device=device) if has_entropy else None
    rank = torch.empty(B, n, dtype=torch.int32, device=device) if has_rank else None
    valid = torch.empty(B, n, dtype=torch.bool, device=device)
    tokens = torch.empty(B, n, dtype=torch.int64, device=device)  # not returned
    out = Sample(tokens, valid, logprob, logz, entropy, rank)
    if B == 0:
        pass
    elif (size := _rows_per_launch(request.hidden)) >= B:
        carry_out(request, kernel, config, out)
    else:
        for first in range(0, B, size):
            rows = slice(first, first + size)
            optional = (x if x is None else x[rows] for x in (logprob, logz, entropy, rank))
            part = Sample(tokens[rows], valid[rows], *optional)
            carry_out(_slice_rows(request, rows), kernel, config, part)
    return Score(logprob, logz, entropy, rank, valid)


def _rows_per_launch(hidden: Tensor) -> int:
    """Return the rows of hidden [B, D] in each launch: equal parts in multiples of 256."""
    B = len(hidden)
    launches = max(1, -(-hidden.nbytes // L2_BYTES))
    return -(-B // launches // 256) * 256


def _slice_rows(request: Request, rows: slice) -> Request:
    """Return the request of these rows only."""
    T, bias, mask = request.temperature, request.bias, request.mask
    return request._replace(
        hidden=request.hidden[rows],
        seed=request.seed[rows],
        temperature=T[rows] if isinstance(T, Tensor) else T,
        bias=bias if bias is None or bias.ndim == 1 else bias[rows],
        mask=mask if mask is None else mask[rows],
    )

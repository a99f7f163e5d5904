"""`flash_sample` and `describe`: the public calls of the fused kernels."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import fused
from fsbench.kernels.checks.tensors import (
    check_matrices,
    check_matrix,
    check_tensor,
    check_top_k,
)
from fsbench.kernels.checks.values import (
    MAX_TOP,
    MAX_V,
    check_flag,
    check_integer,
    check_kernel,
    check_noise,
    check_screened_noise,
)
from fsbench.kernels.configs.choice import choose, explanation, tma_possible
from fsbench.kernels.configs.epilogue import Epilogue
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.fused.by_reference import compute
from fsbench.kernels.launch.heads import PreparedHead, drawn_from
from fsbench.kernels.launch.launch_cache import find, launch_key
from fsbench.kernels.launch.operator import as_operator, is_traced
from fsbench.kernels.launch.quantized import LARGEST_NUMBERS, QuantizedHead
from fsbench.kernels.launch.request import (
    Request,
    check_request,
    checked_request,
    greedy,
    unchecked_request,
)
from fsbench.kernels.launch.result import Extras, Sample, empty_sample, sample_fields
from fsbench.kernels.shard.vocab_shard import VocabShard, reachable


def flash_sample(
    hidden: Tensor,
    weight: Tensor | VocabShard | PreparedHead | QuantizedHead,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor | int,
    offset: Tensor | int | None = None,
    num_samples: int = 1,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    return_logprob: bool = False,
    return_logz: bool = False,
    return_entropy: bool = False,
    return_rank: bool = False,
    return_top: int = 0,
    noise: str = "auto",
    shard: VocabShard | None = None,
    out: Sample | None = None,
    kernel: str = "auto",
    config: TileConfig | HopperConfig | None = None,
) -> Sample:
    """Sample from softmax(logits / temperature) without writing the logits to memory.

    The logits are soft_cap tanh(hidden @ weight.T / soft_cap) + bias, and -inf where the mask
    forbids a token. V below is vocab_size, or the number of rows of weight.

    A call is one kernel launch for every four samples, and one more to pack a bool mask. The host
    waits for the GPU only to allocate workspaces: at the first launch on a device, and when half of
    the workspaces for captures are used. The call can be captured in a CUDA graph after one launch
    outside (fsbench.kernels.launch.workspace), and compiled, as the operator
    torch.ops.fsbench.flash_sample. It has no gradient. On CPU tensors it runs fsbench.reference,
    which draws the same tokens; under TRITON_INTERPRET=1 it runs the kernel, except in bf16, where
    Triton's interpreter is wrong.

    Warning:
        Advance the offset. The same seed, offset and logits give the same token, even when a CUDA
        graph is replayed.

    Args:
        hidden: bf16 or fp16 (on a CPU also fp32) [B, D], contiguous. B may be 0.
        weight: [>= V, D] in hidden's dtype. TMA loads rows of a multiple of 16 bytes if the GPU has
            it; other rows are loaded by pointers, more slowly. Other types:

            - VocabShard: the ranks of its group call together with the same arguments, and all get
              the tokens of the whole vocabulary, which one GPU would draw
              (docs/guide/multi-gpu.md).
            - ScreenedHead: the call runs `screened_sample` if that is faster, else the fused
              kernels on the head's weight; the tokens are the same (`describe` says why). With a
              config, a kernel, several samples or log-probabilities the fused kernels run.
            - QuantizedHead: the logits are those of the quantized weight
              (docs/guide/quantized-heads.md).
        temperature: a number >= 0, or fp32 [B]. 0, or anything below 2^-120, means greedy. A row
            whose temperature in a tensor is negative or not finite has no draw.
        bias: bf16, fp16 or fp32, [V] or [B, V]. -inf forbids a token.
        mask: bool [B, V], or int32 [B, >= V / 32] with token v in bit v % 32 of word v // 32; true
            or 1 allows a token. A forbidden token is never returned.
        seed: an integer, int64 [1], or int64 [B], one per request; all 64 bits are used. With one
            seed the row index enters the noise. With [B] it does not: a request gets the same noise
            in any row. int32, uint32 and uint64 are converted.
        offset: an integer, int64 [1] or [B], the step, modulo 2^32. None is 0. A captured graph
            reads tensors at each replay, so advance offset in place; integers stay as they were.
        num_samples: independent samples per row, with replacement; four per pass over the weight.
        soft_cap: a number > 0 (Gemma's final_logit_softcapping). The error of capped logits is
            soft_cap 2^-22.
        vocab_size: the number of rows of weight that are tokens; the others are padding. A
            VocabShard has a vocab_size; its bias and mask are those of the whole vocabulary,
            on every rank.
        return_logprob, return_logz: fill these fields of the result. The error is below 1e-3
            compared with fp64 on the same logits, or 1e-6 of their size where T is small.
        return_entropy: fill this field, -sum p log p of each row.
        return_rank: fill this field, the rank of each token.
        return_top: the number of largest logits to return, up to 20. With this or return_rank the
            logits are stored, fp32 [B, V], and read by another launch
            (docs/guide/log-probabilities.md). Neither is available with a VocabShard or above 2^20
            tokens.
        noise: "group" or "token". Both sample from the same distribution; "group" is faster
            (docs/design/noise.md). "auto" is "group", or "token" with a ScreenedHead, whose tokens
            must not depend on the kernel that draws them.
        shard: the VocabShard whose weight a ScreenedHead was made from; else None.
        out: a Sample to write to and return; it must have the requested fields.
        kernel: "hopper", "portable", or "auto". The Hopper kernel needs compute capability 9.0 and
            matrices that TMA can load. "auto" takes it if it is the faster one for this B, V and
            GPU, and the noise is group noise (`describe` with why=True explains the choice).
        config: tile shapes, HopperConfig or TileConfig; by default the shipped choice for this GPU,
            B, D and V. Logits and tokens are bitwise the same with any config of either kernel.

    Returns:
        Sample. A row with a NaN or +inf logit, or without a finite logit, has no draw: its token is
        -1 and valid is False. Other rows are not affected.

    Raises:
        InvalidType, InvalidArgument: an argument has the wrong type, dtype, shape, device, layout
            or range, or the kernel cannot run here. Nothing has been launched.
        CaptureError: the workspaces for captures are used up.
    """
    head = weight if isinstance(weight, PreparedHead) else None
    if head is not None:
        head.validate()
        noise = check_screened_noise(noise)
    request = unchecked_request(
        hidden,
        drawn_from(weight, shard),
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        num_samples=num_samples,
        noise=noise,
        may_be_sharded=True,
        may_be_quantized=True,
    )
    flags = (return_logprob, return_logz, return_entropy, return_rank, return_top)
    key = None
    if head is None:
        results = out if type(out) is Sample else ()
        key = launch_key(request, results, "flash_sample", type(out), kernel, config, *flags)
    launch = find(key)
    if launch is not None:
        out = launch.empty_sample() if out is None else out
        launch(request, out)
        return out
    request = check_request(request)
    extras = Extras(
        check_flag("return_logprob", return_logprob),
        check_flag("return_logz", return_logz),
        check_flag("return_entropy", return_entropy),
        check_flag("return_rank", return_rank),
        check_integer("return_top", return_top, 0, MAX_TOP),
    )
    if extras.rank or extras.top:
        _check_stored("return_rank" if extras.rank else "return_top", request)
    kernel = check_kernel(kernel, config)
    if out is None:
        out = empty_sample(request, extras)
    else:
        _check_out(out, request, extras)
    if request.hidden.shape[0] == 0:
        return out
    plain = request.num_samples == 1 and not any(extras)
    if head is not None and plain and kernel == "auto":
        num_tokens = request.vocab_size if shard is None else shard.num_tokens
        chosen, _ = head.choice(request.hidden, num_tokens, all_greedy=greedy(request))
        if chosen is not None:
            head.draw(request, out)
            return out
    carry_out(request, kernel, config, out, key)
    return out


def carry_out(
    request: Request,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    out: Sample,
    key: Hashable = None,
) -> None:
    """Run a checked request and write the results to `out`; as an operator if torch traces.

    kernel, config, key: arguments of `fused.launch.launch`.
    """
    if not is_traced(request.hidden):
        draw(request, kernel, config, out, key)
        return
    values: dict[str, Any] = dict(zip(Request._fields, request, strict=True))
    values |= {"kernel": kernel, "config": config}
    fields = zip(Sample._fields, out, strict=True)
    flash_sample_op(values, {name: field for name, field in fields if field is not None})


def draw(
    request: Request,
    kernel: str,
    config: TileConfig | HopperConfig | None,
    out: Sample,
    key: Hashable = None,
) -> None:
    """Run a request on a kernel, or on the reference if no kernel can run (see `runs_kernels`)."""
    hidden = request.hidden
    # On a CPU the ranks share no memory that a kernel could use.
    can_reach = request.merge_later or reachable(request.shard)
    if hidden.is_cuda or (runs_kernels(hidden.device, hidden.dtype) and can_reach):
        fused.launch.launch(request, kernel, config, out, key=key)
    else:
        choose(hidden, request.weight, request.noise, kernel, config)  # raises if it cannot run
        compute(request, out)


def _draw_values(values: dict[str, Any], results: dict[str, Tensor]) -> None:
    """Run the request whose fields the operator has packed; see `carry_out`."""
    kernel, config = values.pop("kernel"), values.pop("config", None)
    request = Request(**{**dict.fromkeys(Request._fields), **values})
    draw(request, kernel, config, Sample(**results))


flash_sample_op = as_operator("flash_sample", _draw_values)


def local_draw(
    hidden: Tensor,
    weight: Tensor | VocabShard,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    *,
    return_logz: bool = False,
) -> Sample:
    """Return a Sample with this rank's best candidates, packed by `ordered_key`, as tokens.

    The row's token is that of the largest key over all ranks: the noise of a token is the same on
    any rank. logz is that of the rank's tokens, and undefined if they have no draw. The arguments
    are those of `flash_sample`.
    """
    request = checked_request(
        hidden,
        weight,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=None,
        bias=None,
        mask=None,
        vocab_size=None,
        may_be_sharded=True,
    )._replace(merge_later=True)
    out = empty_sample(request, Extras(logz=return_logz))
    draw(request, "auto", None, out)
    return out


def describe(
    hidden: Tensor,
    weight: Tensor | VocabShard | PreparedHead | QuantizedHead,
    *,
    noise: str = "auto",
    kernel: str = "auto",
    config: TileConfig | HopperConfig | None = None,
    top_k: int | Tensor | None = None,
    return_logprob: bool = False,
    why: bool = False,
) -> str:
    """Return the kernel and the tile shapes that `flash_sample` would use, as results record them.

    Only shapes, dtypes, devices and addresses are read. For a VocabShard the description is that of
    this rank's rows. For a ScreenedHead it includes the reason.

    Args:
        hidden, weight, noise, kernel, config: as in `flash_sample`.
        top_k: describe a call of `truncated_sample` with this k instead.
        return_logprob: describe a call with log-probabilities or other sums over the vocabulary.
        why: append, after a colon, the rule and the table row that decide.

    Raises:
        InvalidType, InvalidArgument: as in `flash_sample`.
    """
    heads = VocabShard | PreparedHead | QuantizedHead
    weight_rows = weight.weight if isinstance(weight, heads) else weight
    dtypes = tuple(LARGEST_NUMBERS) if isinstance(weight, QuantizedHead) else ()
    hidden, weight_rows = check_matrices(check_matrix("hidden", hidden), weight_rows, dtypes)
    kernel = check_kernel(kernel, config)
    filtered = top_k is not None
    if filtered:
        check_top_k(top_k, len(hidden), len(weight_rows), hidden.device)
    screened = isinstance(weight, PreparedHead)
    noise, why = (check_screened_noise if screened else check_noise)(noise), check_flag("why", why)
    by_tma = tma_possible(hidden, weight_rows)
    epilogue = Epilogue(sums=check_flag("return_logprob", return_logprob), stored=filtered)
    choice = choose(hidden, weight_rows, noise, kernel, config, epilogue)
    description = str(choice)
    if not isinstance(choice, HopperConfig):
        description += " tma" if by_tma else " pointers"
    if isinstance(weight, PreparedHead) and kernel == "auto":
        chosen, reason = weight.choice(hidden, len(weight_rows), top_k)
        description = f"{chosen or description}; {reason}"
        if chosen:
            return description
    if not why:
        return description
    facts = (*hidden.shape, len(weight_rows), hidden.device, weight_rows.element_size())
    reason = explanation(
        *facts, by_tma=by_tma, noise=noise, kernel=kernel, config=config, epilogue=epilogue
    )
    return f"{description}: {reason}"


def _check_stored(name: str, request: Request) -> None:
    """Raise InvalidArgument if the logits of a request cannot be stored for ranks."""
    if request.shard is not None:
        raise InvalidArgument(f"{name}: expected it off with a VocabShard")
    if request.vocab_size > MAX_V:
        raise InvalidArgument(f"{name}: expected at most {MAX_V} tokens; got {request.vocab_size}")


def _check_out(out: object, request: Request, extras: Extras) -> None:
    """Raise InvalidType or InvalidArgument if `out` has other fields than the requested ones."""
    if not isinstance(out, Sample):
        raise InvalidType(f"out: expected a Sample; got {type(out).__name__}")
    fields = sample_fields(request, extras)
    for name, field in out._asdict().items():
        if name in fields:
            dtype, shape = fields[name]
            check_tensor(f"out.{name}", field, [dtype], [shape], request.hidden.device)
        elif field is not None:
            option = "top" if name.startswith("top") else name
            raise InvalidArgument(
                f"out.{name}: expected None without return_{option}; got a tensor"
            )

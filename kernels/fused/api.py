"""`flash_sample`: the public function, its arguments and its result."""

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
    seed: Tensor,
    offset: Tensor | None = None,
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
    """Draw from softmax(logits / temperature), logits = hidden @ weight.T; they stay on chip.

    The logits that are sampled are soft_cap tanh(hidden @ weight.T / soft_cap) + bias, and -inf
    where the mask forbids a token. V below is vocab_size, or the number of rows of weight.

    Warning:
        An offset that is not advanced repeats the draw: the same seed, offset and logits give the
        same token, in a replayed graph too.

    Args:
        hidden: [B, D] bf16 or fp16 (on a CPU also fp32), contiguous. B may be 0.
        weight: [>= V, D], like hidden. Rows of a multiple of 16 bytes are loaded by TMA where the
            GPU has it; others by pointers, more slowly. Or a VocabShard: the ranks of its group
            call together with the same arguments, and all get the tokens of the whole vocabulary,
            those that one GPU would draw (docs/guide/multi-gpu.md). Or a ScreenedHead: the call is
            one of screened_sample where that is faster (`describe` says why; tokens do not depend
            on it), else one with the head's own weight. A config, a kernel, several samples and
            log-probabilities take the fused kernels. Or a QuantizedHead, whose own logits are
            sampled (docs/guide/quantized-heads.md).
        temperature: >= 0, or fp32 [B]; 0 is greedy, and so is anything below 2^-120. A row whose
            temperature in a tensor is negative or not finite has no draw.
        bias: [V] or [B, V], bf16, fp16 or fp32. -inf forbids a token.
        mask: bool [B, V], or int32 [B, >= V / 32] with token v in bit v % 32 of word v // 32;
            true or 1 allows a token. A forbidden token is never returned. Bools are packed by a
            launch of its own.
        seed: int64 [1], or [B] with one per request; all 64 bits count. With [1] the row's number
            enters the noise; with [B] it does not, and a request gets the same noise at any row.
        offset: int64 [1] or [B]: the step, modulo 2^32; None is 0. A captured graph reads seed
            and offset at each replay: advance offset in place to draw afresh.
        num_samples: independent draws per row, with replacement; four per pass over the weight.
        soft_cap: > 0 (Gemma's final_logit_softcapping); capped logits err by soft_cap 2^-22.
        vocab_size: the first V rows of weight are tokens, the rest is padding. A VocabShard has its
            own; with one, bias and mask are of the whole vocabulary, on every rank.
        return_logprob, return_logz: fill these fields of the result; within 1e-3 of fp64 on the
            same logits, or 1e-6 of their size where T is small.
        return_entropy: fill this field, -sum p log p of each row.
        return_rank, return_top: the rank of each token, and so many of the largest logits, up to
            20. With either the logits are stored, fp32 [B, V], and looked at by a launch of its
            own (docs/guide/log-probabilities.md). Not with a VocabShard, nor above 2^20 tokens.
        noise: "group" or "token": two forms of the same law, of which "group" is faster (docs/
            design/noise.md). "auto" is "group", or "token" with a ScreenedHead, which has no other:
            tokens must not depend on where they are drawn.
        shard: whose rows a ScreenedHead is of, prepare_head of its weight; else None.
        out: a Sample to write to and return; its fields must match what is asked for.
        kernel: "hopper", "portable", or "auto": the Hopper kernel where it can run, is the faster
            one for this B, V and GPU, and the noise is group noise (`describe` with why=True says
            which, and why). It can run on compute capability 9.0, on matrices that TMA can load.
        config: tile shapes, HopperConfig or TileConfig; by default the shipped choice for this GPU,
            B, D and V. Logits are the same bits with any config of either kernel, so are tokens.

    Returns:
        Sample. A row with a NaN or +inf logit, or without a finite one, has no draw: its token is
        -1, valid is False, and no other row is disturbed.

    One launch (one for every four samples; one more to pack a mask of bools). The host does not
    wait for it, except where workspaces are allocated: at the first launch on a device, and at one
    that finds those set aside for captures half used. It may be captured in a CUDA graph, after one
    launch outside (fsbench.kernels.launch.workspace), and compiled, as the operator
    torch.ops.fsbench.flash_sample. There is no gradient. On CPU tensors it runs fsbench.reference,
    which draws the same tokens, or under TRITON_INTERPRET=1 the kernel (but not in bf16, where
    Triton's interpreter is wrong).

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device, layout
            or range, or a kernel that cannot run here; nothing has been launched.
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
    wanted = Extras(
        check_flag("return_logprob", return_logprob),
        check_flag("return_logz", return_logz),
        check_flag("return_entropy", return_entropy),
        check_flag("return_rank", return_rank),
        check_integer("return_top", return_top, 0, MAX_TOP),
    )
    if wanted.rank or wanted.top:
        _check_stored("return_rank" if wanted.rank else "return_top", request)
    kernel = check_kernel(kernel, config)
    if out is None:
        out = empty_sample(request, wanted)
    else:
        _check_out(out, request, wanted)
    if request.hidden.shape[0] == 0:
        return out
    plain = request.num_samples == 1 and not any(wanted)
    if head is not None and plain and kernel == "auto":
        own = request.vocab_size if shard is None else shard.num_tokens
        chosen, _ = head.choice(request.hidden, own)
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
    """Draw what a checked request asks for into `out`, as an operator if torch traces.

    kernel, config, key: as `fused.launch.launch` takes them.
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
    """Draw into `out` with a kernel, or on a CPU by the reference (see runs_kernels)."""
    hidden = request.hidden
    # A CPU's ranks share no memory that a kernel could reach.
    alone = request.merge_later or reachable(request.shard)
    if hidden.is_cuda or (runs_kernels(hidden.device, hidden.dtype) and alone):
        fused.launch.launch(request, kernel, config, out, key=key)
    else:
        choose(hidden, request.weight, request.noise, kernel, config)  # refuses what cannot run
        compute(request, out)


def _draw_values(values: dict[str, Any], results: dict[str, Tensor]) -> None:
    """Draw, as the operator has the request: see carry_out."""
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
    """Return this rank's best candidates, packed (noise.keys.ordered_key), in place of tokens.

    The largest over all ranks is the row's: the noise of a token is the same on any rank. logz is
    that of the rank's tokens; it means nothing where these have no draw. Arguments are those of
    flash_sample.
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
    why: bool = False,
) -> str:
    """The kernel and tile shapes that flash_sample would run with, as results record them.

    top_k: of a plain call of truncated_sample, whose kernels these are then.
    why: and by which rule and row of the tables they are chosen, after a colon.

    The arguments are those of flash_sample; only shapes, dtypes, device and addresses are read. For
    a VocabShard it is what this rank runs on its rows. For a ScreenedHead the reason is there, too.

    Raises:
        InvalidType, InvalidArgument: as flash_sample.
    """
    heads = VocabShard | PreparedHead | QuantizedHead
    rows = weight.weight if isinstance(weight, heads) else weight
    dtypes = tuple(LARGEST_NUMBERS) if isinstance(weight, QuantizedHead) else ()
    hidden, rows = check_matrices(check_matrix("hidden", hidden), rows, dtypes)
    kernel = check_kernel(kernel, config)
    filtered = top_k is not None
    if filtered:
        check_top_k("top_k", top_k, len(hidden), len(rows), hidden.device)
    screened = isinstance(weight, PreparedHead)
    noise, why = (check_screened_noise if screened else check_noise)(noise), check_flag("why", why)
    by_tma = tma_possible(hidden, rows)
    choice = choose(hidden, rows, noise, kernel, config)
    found = str(choice)
    if not isinstance(choice, HopperConfig):
        found += " tma" if by_tma else " pointers"
    if isinstance(weight, PreparedHead) and kernel == "auto":
        chosen, reason = weight.choice(hidden, len(rows), top_k)
        found = f"{chosen or found}; {reason}"
        if chosen:
            return found
    if not why:
        return found
    facts = (*hidden.shape, len(rows), hidden.device, rows.element_size())
    return (
        f"{found}: {explanation(*facts, by_tma=by_tma, noise=noise, kernel=kernel, config=config)}"
    )


def _check_stored(name: str, request: Request) -> None:
    """Refuse what has no stored logits to look at."""
    if request.shard is not None:
        raise InvalidArgument(f"{name}: expected it off with a VocabShard")
    if request.vocab_size > MAX_V:
        raise InvalidArgument(f"{name}: expected at most {MAX_V} tokens; got {request.vocab_size}")


def _check_out(out: object, request: Request, wanted: Extras) -> None:
    """Refuse a Sample whose fields do not match what is asked for."""
    if not isinstance(out, Sample):
        raise InvalidType(f"out: expected a Sample; got {type(out).__name__}")
    fields = sample_fields(request, wanted)
    for name, field in out._asdict().items():
        if name in fields:
            dtype, shape = fields[name]
            check_tensor(f"out.{name}", field, [dtype], [shape], request.hidden.device)
        elif field is not None:
            option = "top" if name.startswith("top") else name
            raise InvalidArgument(
                f"out.{name}: expected None without return_{option}; got a tensor"
            )

"""`truncated_sample`: top-k, top-p, min-p and penalties on the fused path."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fsbench.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fsbench.kernels._arguments import Request
    from fsbench.kernels._flash_sampling_config import TileConfig
    from fsbench.kernels._hopper_config import HopperConfig
    from fsbench.kernels._stored_logits import StoredLogits
    from fsbench.kernels._token_history import Penalties

MAX_V = 2**20
"""Tokens that a program can have the maxima of in registers."""

SMALL_K = 448
"""Up to this k of all rows, one launch draws from the logits of few groups."""

SEARCHES = 4
"""Times that many programs narrow down where a row's cutoff is, if they need so many."""

LOOK = {"num_warps": 8}
ROW_WARPS = 4

CUTOFF = {"num_warps": 8, "maxnreg": 128}
"""Two programs on each multiprocessor: they wait for memory and for each other."""

PROGRAMS = {"sections": 1280, "cutoff": 264, "race": 900}
"""Programs of a launch over rows: about what fits on a large GPU at once."""


class TruncatedSample(NamedTuple):
    """What truncated_sample returns.

    tokens: int64 [B]; -1 in a row that has no draw.
    valid: bool [B]; False for a row that has no draw.
    kept: int32 [B]: how many tokens the filters kept, 0 in a row without a draw; or None.
    """

    tokens: Tensor
    valid: Tensor
    kept: Tensor | None


def truncated_sample(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    penalties: Penalties | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor,
    offset: Tensor | None = None,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    return_kept: bool = False,
    config: TileConfig | HopperConfig | None = None,
) -> TruncatedSample:
    """Draw from softmax(logits / temperature) over the tokens that the filters keep.

    logits = hidden @ weight.T in fp32, then soft cap, bias and mask, then penalties: of this number
    one copy is stored, and everything is decided on it. The filters are those of
    fsbench.reference.truncate in fsbench's order: min-p, then top-k, then top-p of the mass that
    these left; of equal logits the lower token goes first, and top-k keeps exactly k.

    Args:
        hidden, weight, temperature, bias, mask, seed, offset, soft_cap, vocab_size: as in
            flash_sample. A greedy row takes the largest logit, whatever its filters.
        top_k: keep the k largest logits; 0 or below is off. An integer, or int32 or int64 [B].
        top_p: keep the fewest of the largest whose probability reaches p; 1 or above is off, and 0
            or below keeps one token. A number, or fp32 [B]; a row with NaN has no draw.
        min_p: keep what has at least this part of the largest probability; 0 or below is off. A
            number, or fp32 [B]; a row with NaN has no draw.
        penalties: on the tokens of a TokenHistory; it costs time for these tokens only.
        return_kept: also count what the filters keep. It costs time: without it the search for
            where a row is cut off ends when its token is known.
        config: tile shapes of one of flash_sample's kernels, and so which; by default its choice.

    Returns:
        TruncatedSample. A row with a NaN or +inf logit, or without a finite one, has no draw.

    The first draw is flash_sample's, from all tokens with group noise; if the filters keep it, it
    is the row's token. If not, or with penalties, it is the kept token of the largest logit +
    temperature Gumbel, with token noise (docs/noise.md). Both are keyed by seed, offset, row and
    token, so the token depends on neither tile nor batch size, and with all filters off it is
    flash_sample's. Top-k is exact; sums of probabilities are in fp32, so top-p is met within 2^-16
    of the mass, always in the same way.

    Two launches for a small top_k of all rows, up to eight for other filters, one more to pack a
    mask of bools. [B, V] fp32 logits are allocated, and some 10 % of that beside them. The host
    waits as little as for flash_sample; CUDA graphs may capture it, after one launch outside, and
    replays read seed, offset, and all [B] arguments again. On CPU tensors it runs
    fsbench.reference, or under TRITON_INTERPRET=1 the kernels (not in bf16).

    Raises:
        InvalidType, InvalidArgument: an argument of the wrong type, dtype, shape, device, layout or
            range, or a config that cannot run here; nothing has been launched.
        CaptureError: the workspaces for captures are used up.
    """
    import torch

    from fsbench.kernels import _arguments as check
    from fsbench.kernels._choice import choose
    from fsbench.kernels._flash_sample_op import interpretable

    hidden, weight = check.check_matrices(hidden, weight)
    B, device = hidden.shape[0], hidden.device
    V = weight.shape[0]
    if vocab_size is not None:
        V = check.check_integer("vocab_size", vocab_size, 1, V)
    if V > MAX_V:
        raise InvalidArgument(f"weight: expected at most {MAX_V} tokens; got {V}")
    temperature = check.check_temperature(temperature, B, device)
    filters = _Filters(
        _integer("top_k", top_k, B, device),
        _number("top_p", top_p, B, device),
        _number("min_p", min_p, B, device),
    )
    if bias is not None:
        check.check_bias(bias, B, V, device)
    if mask is not None:
        check.check_mask(mask, B, V, device)
    check.check_counter("seed", seed, B, device)
    if offset is not None:
        check.check_counter("offset", offset, B, device)
    if soft_cap is not None:
        soft_cap = check.check_number("soft_cap", soft_cap, positive=True)
    kernel = check.check_kernel("auto", config)
    if penalties is not None:
        _check_penalties(penalties, B, device)
    request = check.Request(
        hidden, weight, seed, offset, temperature, soft_cap, bias, mask, V, 1,
        "group" if penalties is None else "none",
    )  # fmt: skip
    choice = choose(hidden, weight, request.noise, kernel, config)
    sample = TruncatedSample(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        torch.empty(B, dtype=torch.int32, device=device) if return_kept else None,
    )
    if device.type == "cuda" or interpretable(request):
        _launch(request, choice, filters, penalties, sample)
    else:
        _compute(request, filters, penalties, sample)
    return sample


class _Filters(NamedTuple):
    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor


def _integer(name: str, value: object, B: int, device: torch.device) -> int | Tensor:
    """An integer, or int32 or int64 [B]."""
    import torch

    from fsbench.kernels import _arguments as check

    if isinstance(value, torch.Tensor):
        return check.check_tensor(name, value, [torch.int32, torch.int64], [(B,)], device)
    # What is below 0 is off, as in other libraries.
    return max(0, check.check_integer(name, value, -(2**31), 2**31 - 1))


def _number(name: str, value: object, B: int, device: torch.device) -> float | Tensor:
    """A finite number, or fp32 [B]."""
    import math

    import torch

    from fsbench.kernels import _arguments as check

    if isinstance(value, torch.Tensor):
        return check.check_tensor(name, value, [torch.float32], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"{name}: expected a number or a tensor; got {type(value).__name__}")
    if not math.isfinite(value):
        raise InvalidArgument(f"{name}: expected a finite number; got {value}")
    return float(value)


def _check_penalties(penalties: object, B: int, device: torch.device) -> None:
    from fsbench.kernels._token_history import Penalties, TokenHistory

    if not isinstance(penalties, Penalties):
        raise InvalidType(f"penalties: expected Penalties; got {type(penalties).__name__}")
    history = penalties.history
    if not isinstance(history, TokenHistory):
        raise InvalidType(
            f"penalties.history: expected a TokenHistory; got {type(history).__name__}"
        )
    if len(history.tokens) != B or history.tokens.device != device:
        raise InvalidArgument(
            f"penalties.history: expected {B} rows on {device}; got {len(history.tokens)} on "
            f"{history.tokens.device}"
        )
    for name in ("repetition", "presence", "frequency"):
        value = _number(f"penalties.{name}", getattr(penalties, name), B, device)
        if name == "repetition" and isinstance(value, float) and value <= 0:
            raise InvalidArgument(f"penalties.repetition: expected a number > 0; got {value}")


def _launch(
    request: Request,
    choice: TileConfig | HopperConfig,
    filters: _Filters,
    penalties: Penalties | None,
    sample: TruncatedSample,
) -> None:
    """The fused kernel, the first look at the logits it leaves, and what rows need beyond that."""
    import torch
    import triton

    from fsbench.kernels._cutoff import GATHERED
    from fsbench.kernels._device import launching_on
    from fsbench.kernels._flash_sample import Sample
    from fsbench.kernels._launch import launch, per_row
    from fsbench.kernels._row_plan import NUMBERS, PLAN
    from fsbench.kernels._stored_logits import allocate
    from fsbench.kernels._truncated_kernels import COUNTERS, GROUP, sampling_look_kernel

    B, V, device = len(request.hidden), request.vocab_size, request.hidden.device
    stored = allocate(B, V, device, largest=True)
    launch(request, choice, Sample(sample.tokens, sample.valid, None, None), stored)
    stride = stored.logits.shape[1]
    few = chunk(filters.top_k)
    found = torch.empty(B, COUNTERS.value + few, dtype=torch.int32, device=device)
    most = min(few * GROUP.value, GATHERED.value)
    keys = torch.empty(B, most, dtype=torch.int64, device=device)
    plan = numbers = None
    if not is_small(filters.top_k):
        plan = torch.empty(B, PLAN.value, dtype=torch.int64, device=device)
        numbers = torch.empty(B, NUMBERS.value, dtype=torch.float32, device=device)
    history = None if penalties is None else penalties.history
    of_history = (None, None, None) if history is None else (
        history.tokens, history.counts, history.lengths
    )  # fmt: skip
    amounts = _amounts(penalties)
    with launching_on(device):
        sampling_look_kernel[(B,)](
            *stored,
            found,
            keys,
            plan,
            numbers,
            request.seed,
            request.offset,
            request.temperature,
            *filters,
            *of_history,
            *amounts.values(),
            *sample,
            V,
            stride,
            1 if history is None else history.tokens.shape[1],
            **per_row(request),
            **{
                f"{name.upper()}_PER_ROW": isinstance(value, torch.Tensor)
                for name, value in {**filters._asdict(), **amounts}.items()
            },
            GROUPS=max(32, triton.next_power_of_2(stride // GROUP.value)),
            CHUNK=few,
            **LOOK,
        )
        if plan is not None and numbers is not None:
            _launch_rows(request, filters, stored, plan, numbers, sample)


def _launch_rows(
    request: Request,
    filters: _Filters,
    stored: StoredLogits,
    plan: Tensor,
    numbers: Tensor,
    sample: TruncatedSample,
) -> None:
    """Many programs for each row that the first look did not finish; the others cost nothing."""
    import triton

    from fsbench.kernels import _row_kernels as kernels
    from fsbench.kernels._launch import per_row

    logits = stored.logits
    B, stride = logits.shape
    blocks = triton.cdiv(stride, kernels.BLOCK.value)
    # At least one program for each row; programs for one row share its blocks.
    grid = {name: (max(B, min(B * blocks, most)),) for name, most in PROGRAMS.items()}
    rows = max(32, triton.next_power_of_2(B))
    per = {name: per_row(request)[name] for name in ("SEED_PER_ROW", "OFFSET_PER_ROW")}
    noise = request.seed, request.offset
    times = searches(filters, stride // 32)
    if times > 0:
        sums = logits.new_empty(B, blocks, kernels.SECTIONS.value)
        before = logits.new_empty(B, blocks)
        for turn in range(times):
            kernels.sampling_sections_kernel[grid["sections"]](
                logits,
                plan,
                numbers,
                sums,
                None if turn else before,
                turn,
                B,
                stride,
                blocks,
                ROWS=rows,
                COUNT=sample.kept is not None,
                num_warps=ROW_WARPS,
            )
    if times >= 0:
        gathered = plan.new_empty(B, kernels.GATHERED.value)
        kernels.sampling_cutoff_kernel[grid["cutoff"]](
            logits, plan, numbers, gathered, *noise, *sample, times, B, stride,
            ROWS=rows, **per, **CUTOFF,
        )  # fmt: skip
    kernels.sampling_race_kernel[grid["race"]](
        *stored, plan, numbers, *noise, *sample, times + 1, B, stride, blocks,
        ROWS=rows, **per, num_warps=ROW_WARPS,
    )  # fmt: skip


def _amounts(penalties: Penalties | None) -> dict[str, float | Tensor]:
    """The penalties by name, numbers as float; off if there are none."""
    if penalties is None:
        return {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    named = penalties._asdict()
    del named["history"]
    return {n: float(v) if isinstance(v, int | float) else v for n, v in named.items()}


def is_small(top_k: int | Tensor) -> bool:
    """Whether all rows need few logits, unless many are equal: then one launch does everything."""
    return isinstance(top_k, int) and 0 < top_k <= SMALL_K


def searches(filters: _Filters, groups: int) -> int:
    """How often rows may need a search before their tokens can be gathered; -1: nor is that."""
    from fsbench.kernels._truncated_kernels import GATHERED_K

    top_k, top_p = filters.top_k, filters.top_p
    if not isinstance(top_k, int):
        return SEARCHES
    if top_k == 0 and isinstance(top_p, float) and top_p >= 1.0:
        return -1
    return 0 if 0 < top_k <= GATHERED_K.value and top_k < groups else SEARCHES


def chunk(top_k: int | Tensor) -> int:
    """Groups that one program draws from: for a small k of all rows those it needs."""
    if not isinstance(top_k, int) or not is_small(top_k):
        return 128
    return max(32, 1 << (top_k + top_k // 8 - 1).bit_length())


def _compute(
    request: Request, filters: _Filters, penalties: Penalties | None, sample: TruncatedSample
) -> None:
    """The same by fsbench.reference, on logits accumulated in fp32."""
    import torch

    from fsbench import reference

    logits = request.hidden.float() @ request.weight[: request.vocab_size].float().T
    logits = reference.processed_logits(
        logits, soft_cap=request.soft_cap, bias=request.bias, mask=request.mask
    )
    if penalties is not None:
        seen, counts = penalties.history.dense(request.vocab_size)
        logits = reference.penalised(logits, seen, counts, **_amounts(penalties))
    kept = reference.truncate(logits, request.temperature, **filters._asdict())
    step = torch.zeros(1, dtype=torch.int64) if request.offset is None else request.offset
    noise = "group" if penalties is None else "token"
    tokens = reference.expect(
        logits, request.seed, step, request.temperature, noise, truncation=kept
    ).tokens
    sample.tokens.copy_(tokens)
    sample.valid.copy_(tokens >= 0)
    if sample.kept is not None:
        sample.kept.copy_(kept.kept.sum(1))

"""`Provider`: the contract between a sampler's file and the harness.

It imports only errors and problem. docs/guide/adding-a-sampler.md has a worked example.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fsbench.errors import InvalidArgument
from fsbench.problem import DEVICES, DTYPES, FILTER_ORDER, FILTERS, PRESETS, QUANTIZED, Problem

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # a sampler's file takes it from here for annotations, and need not import torch


class Kind(StrEnum):
    """Meaning of a provider's output. Only providers of one kind are compared."""

    EXACT = "exact"  # draws from softmax(logits / T)
    TRUNCATED = "truncated"  # draws from a filtered softmax (top-k, top-p, min-p)
    GREEDY = "greedy"  # argmax of the logits
    SCORE = "score"  # draws nothing: log softmax(logits / T) at given targets
    LOWER_BOUND = "lower_bound"  # not a sampler: a floor to draw as a line, never a winner


class Launch(Protocol):
    """One decode step. Does only what a serving engine would do at every step.

    Args of the call:
        hidden: [B, D], contiguous, the problem's dtype and device.
        seed: int64 [1], on the device.
        offset: int64 [1], on the device: the step. A captured CUDA graph reads it at each replay,
            so advancing it in place gives fresh noise. Samplers whose noise comes from torch's
            generator ignore seed and offset.

    Returns:
        [B] token ids, int32 or int64. A SCORE returns fp32 [B], the log-probabilities of
        Problem.row_targets. A LOWER_BOUND may return anything.

    Optional attributes: `config: str` names the tile shapes chosen, and `shared_bytes: int` is
    memory that outlives a launch and serves several; results record both.
    """

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor: ...


ALIGNED = 64
"""Rows of a weight are padded to a multiple of this."""


def padded(weight: Tensor) -> Tensor:
    """Return weight [V, D] with rows of zeros up to a multiple of ALIGNED; itself if V is one.

    Samplers that store logits call it once, in `build`. Engines keep the LM head in this form,
    since cuBLAS takes much longer if the rows of logits are not aligned. The logits are the first V
    columns of the product, a view.
    """
    extra = -len(weight) % ALIGNED
    if not extra:
        return weight
    rows = weight.new_zeros(len(weight) + extra, weight.shape[1])
    rows[: len(weight)] = weight
    return rows


class Drawn(Protocol):
    """Result of `Provider.sample`: an object with these tokens; other fields are allowed.

    tokens: int32 or int64 [B]; [B, n] with num_samples=n above 1.
    logprob, of a sampler that claims it: of the tokens' shape: log softmax(logits / T) at each,
        over all tokens, whatever filters keep; None if not asked for.
    entropy, rank, top_tokens and top_logprob, of one that claims entropy, rank or top: as
        fsbench.kernels.flash_sample returns them.
    """

    @property
    def tokens(self) -> Tensor: ...


OPTIONS = (
    "per_row_temperature",
    "greedy_rows",
    "bias",
    "mask",
    "per_request_seed",
    "logprob",
    "entropy",
    "rank",
    "top",
    "num_samples",
)
"""Capabilities without an argument of `Launch`: claimed only with `Provider.sample`, or `score`."""


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a sampler; docs/guide/adding-a-sampler.md says how each is checked.

    devices: "cuda", "cpu"; elsewhere it is listed as unavailable.
    dtypes: of hidden and weight; other problems are unsupported.
    noise: "token" or "group" if tokens follow fsbench.reference.expect with that form of noise, for
        the same logits, seed and offset; None for other noise, which is judged in
        distribution.
    zero_temperature: T = 0 is accepted and means greedy.
    fused: the [B, V] logits never exist in memory.
    graph_safe: may be captured in a CUDA graph.
    host_sync_free: a launch after the first never makes the host wait for the GPU.
    batch_invariant: given equal logits, a row's token depends on neither B nor the other rows.
    quantized: forms of quantized heads that it takes, as a QuantizedWeight in place of the weight,
        in `build`, `sample` and `score`. For other forms it gets a weight of the problem's dtype
        with the head's numbers.
    known_deviation: total variation distance of an EXACT sampler from the softmax, known for one of
        its dtypes; checks allow it, and the sampler's docstring says why.
    exact_to_gap: range of the noise of an EXACT sampler: tokens with a probability below
        e^-exact_to_gap may be drawn too rarely. None if no limit is known.
    excess_beyond_gap: fraction of their probability by which those may be drawn too often.
    seed_stride: the least distance of two seeds whose noise is independent at the same step.

    For truncated problems:

    filters: those of fsbench.problem.FILTERS that it applies; it refuses others.
    mixed_filters: filters may differ between rows (Problem.mixed).
    penalties: it applies those of Problem, before the filters.
    filter_order: in which order it applies them and the temperature (fsbench.reference.truncate).
    ties: equal logits that top-k and top-p keep if only some are needed: the lowest ids ("first",
        fsbench's rule), all of them ("kept"), or "any".

    The OPTIONS, arguments of `Provider.sample`:

    per_row_temperature: temperature may be a tensor [B].
    greedy_rows: it may hold zeros: greedy rows among sampled ones, in one launch.
    bias: a bias [V] or [B, V] is added to the logits.
    mask: a mask [B, V], or packed into words, forbids tokens.
    per_request_seed: seed may be [B]: a request's token then does not depend on its row.
    logprob: the log-probability of each token is returned on request.
    entropy: the entropy of softmax(logits / T) is returned on request.
    rank: the number of tokens with a larger logit is returned on request.
    top: the largest logits, up to 20, are returned on request.
    num_samples: n independent tokens per row, with replacement.
    """

    devices: tuple[str, ...] = ("cuda",)
    dtypes: tuple[str, ...] = ("bf16", "fp16")
    noise: Literal["token", "group"] | None = None
    zero_temperature: bool = False
    fused: bool = False
    graph_safe: bool = True
    host_sync_free: bool = False
    batch_invariant: bool = False
    per_row_temperature: bool = False
    greedy_rows: bool = False
    bias: bool = False
    mask: bool = False
    per_request_seed: bool = False
    logprob: bool = False
    entropy: bool = False
    rank: bool = False
    top: bool = False
    num_samples: bool = False
    quantized: tuple[str, ...] = ()
    known_deviation: float = 0.0
    exact_to_gap: float | None = None
    excess_beyond_gap: float = 0.0
    seed_stride: int = 1
    filters: tuple[str, ...] = ()
    mixed_filters: bool = False
    penalties: bool = False
    filter_order: tuple[str, ...] = FILTER_ORDER
    ties: Literal["first", "kept", "any"] = "first"


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized LM head: the logit of token v is scale[v] (hidden . weight[v]).

    weight: [V, D] int8 or float8_e4m3fn, contiguous. scale: fp32 [V], powers of two.
    """

    weight: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Shard:
    """One rank's rows of an LM head that is split by vocabulary over the ranks of a group.

    weight: [sizes[rank], D], contiguous: the rows from token sum(sizes[:rank]) on.
    sizes: rows of every rank; they may differ, and begin anywhere.
    group: the process group of torch.distributed; one GPU each (NCCL), or CPUs (gloo).
    """

    weight: Tensor
    sizes: tuple[int, ...]
    rank: int
    group: Any


@dataclass(frozen=True)
class Tuning:
    """Tile shapes of a sampler's kernel that `fsbench tune` times and chooses from.

    A config is an object of the kernel's own that can be printed, hashed and pickled. A greedy
    sampler, or one with noise of the contract, is checked with each before it is timed.

    kernel: name of the kernel, in `--kernel` and in files of tables.
    buckets: batch sizes that have a config each, ascending; smaller ones share the next.
    configs: problem -> what is worth timing on the current GPU; first, the one in use.
    build: (problem, weight, config) -> launch; see `Provider`.
    text: (name of the GPU, record, rows) -> a table as text, to be put into a file. A row is
        (bucket, largest D or None for any, config), and the record says what it is based on.
    """

    kernel: str
    buckets: tuple[int, ...]
    configs: Callable[[Problem], list[Any]]
    build: Callable[[Problem, Tensor, Any], Launch]
    text: Callable[[str, str, list[tuple[int, int | None, Any]]], str]


@dataclass(frozen=True)
class Provider:
    """A sampler, or a lower bound, for all commands of fsbench.

    name: primary key in results, equal to the file's stem; never renamed.
    label: legend text, free to change.
    kind: meaning of its tokens (`Kind`); only samplers of one kind are compared.
    build: untimed: (problem, weight [V, D]) -> launch. May allocate, compile and load tables.
    requires: top-level packages it needs beyond the core; absent means listed as unavailable.
    not_built: returns None, or a line about a library still to be compiled; imports no torch.
    compute_capability: the only compute capability of NVIDIA GPUs on which it runs; None for any.
    capabilities: its claims; a test checks each of them.
    supports: problem -> None, or why this sampler cannot do it (beyond `capabilities`).
    presets: the presets of `fsbench run` that include it.
    kept_bytes: problem -> memory that `build` keeps in addition to the weight: a copy, tables.
        Scratch memory and workspaces do not count; results have the peak of all (peak_extra_bytes).
    noise_map: int64 [n] of 32-bit codes -> (Exp(1), Gumbel(0, 1)), fp32 [n] each, by the device
        code that the sampler's noise comes from; None if it does not offer it.
    sample: the full call, sample(hidden, weight, *, seed, offset, temperature, ...) -> Drawn, with
        the arguments of fsbench.kernels.flash_sample, and the OPTIONS that are claimed. None if the
        sampler only has `build`.
    score: of a SCORE, the full call, score(hidden, weight, targets, *, ...), with the arguments and
        the result of fsbench.kernels.score, as far as they are claimed; or None.
    accept: compares drafts, int64 [B, k], with sampled tokens [B, k + 1], as verify_drafts does.
    call: the public function of fsbench.kernels that does this by default, or "".
    tuning: how `fsbench tune` times its tile shapes; None if it cannot.
    build_sharded: as build, for problems with tp > 1: (problem, Shard) -> launch. All ranks build
        together, and launch together with the same hidden, seed and offset; every rank returns the
        same tokens. None if the sampler runs on one GPU only.
    matmul_form: as build, of a fused sampler: its kernel with only the matmul, and a result that
        keeps the compiler from removing it. `fsbench run --breakdown` times it. None without such
        a form.
    tunes: building it times variants, so nothing else may use the device meanwhile.

    Raises:
        InvalidArgument: a field has a name that does not exist, or one of the OPTIONS is claimed,
            but there is no `sample` to show it.
    """

    name: str
    label: str
    kind: Kind
    build: Callable[[Problem, Any], Launch]
    requires: tuple[str, ...] = ()
    compute_capability: tuple[int, int] | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    supports: Callable[[Problem], str | None] = lambda problem: None
    presets: tuple[str, ...] = ()
    kept_bytes: Callable[[Problem], int] = lambda problem: 0
    sample: Callable[..., Drawn] | None = None
    score: Callable[..., Any] | None = None
    accept: Callable[[Tensor, Tensor], Any] | None = None
    call: str = ""
    noise_map: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    tuning: Tuning | None = None
    build_sharded: Callable[[Problem, Shard], Launch] | None = None
    matmul_form: Callable[[Problem, Tensor], Launch] | None = None
    not_built: Callable[[], str | None] = lambda: None
    tunes: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            raise InvalidArgument(f"{self.name}: kind: expected a Kind; got {self.kind!r}")
        able = self.capabilities
        for field_, values, names in (
            ("presets", self.presets, PRESETS),
            ("devices", able.devices, DEVICES),
            ("dtypes", able.dtypes, DTYPES),
            ("filters", able.filters, FILTERS),
            ("quantized", able.quantized, QUANTIZED),
            ("filter_order", able.filter_order, FILTER_ORDER),
            ("ties", (able.ties,), ("first", "kept", "any")),
        ):
            if not set(values) <= set(names):
                raise InvalidArgument(
                    f"{self.name}: {field_}: expected some of {', '.join(names)}; got {values!r}"
                )
        claimed = [option for option in OPTIONS if getattr(self.capabilities, option)]
        if claimed and self.sample is None and self.score is None:
            raise InvalidArgument(
                f"{self.name}: expected `sample`, by which {', '.join(claimed)} can be requested; "
                "got None"
            )

    def kind_on(self, problem: Problem) -> Kind:
        """Return the kind of its tokens on a problem: TRUNCATED with filters or penalties."""
        if (problem.filters or problem.penalties) and self.kind is Kind.EXACT:
            return Kind.TRUNCATED
        return self.kind

    def missing_packages(self) -> str | None:
        """Return the packages of `requires` that cannot be imported, or None. Imports nothing."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        return f"package {', '.join(missing)} is not installed" if missing else None

    def unsupported_reason(self, problem: Problem) -> str | None:
        """Return why this sampler cannot do `problem`, as one line, or None if it can."""
        able = self.capabilities
        if problem.device not in able.devices:
            return f"runs on {', '.join(able.devices)} only, not on {problem.device}"
        if problem.dtype not in able.dtypes:
            return f"takes {', '.join(able.dtypes)}, not {problem.dtype}"
        draws = self.kind not in (Kind.GREEDY, Kind.LOWER_BOUND)
        if draws:  # the argmax, and a lower bound, are the same with any filter
            lacking = [name for name in problem.filters if name not in able.filters]
            if lacking:
                return f"does not apply {', '.join(lacking)}"
            if problem.mixed and not able.mixed_filters:
                return "takes the same filters for all rows"
        if problem.penalties and not able.penalties and self.kind is not Kind.LOWER_BOUND:
            return "does not apply penalties"
        if problem.temperature == 0 and draws and not able.zero_temperature:
            return "does not take temperature 0 (greedy)"
        if problem.tp != 1 and self.build_sharded is None:
            return f"runs on one GPU, not with tp={problem.tp}"
        return self.supports(problem)

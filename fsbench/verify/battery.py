"""Which checks a sampler faces, by tier, and their running.

The tiers: `gate`, what `fsbench run` asks before it times (seconds); `ci`, every check within two
minutes for all samplers that run on a CPU; `full`, with the draws that a claim of exactness needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial

from fsbench.errors import (
    InvalidArgument,
    ProviderUnavailable,
    UnsupportedProblem,
    VerificationFailed,
    describe,
    is_out_of_memory,
    one_line,
    unknown_name,
)
from fsbench.inputs import serving
from fsbench.provider import Kind, Provider
from fsbench.verify import (
    call,
    distribution,
    invariance,
    joint,
    noise,
    pathwise,
    scores,
    speculation,
    support,
    truncation,
)
from fsbench.verify.check import WRONG, Check, Setting
from fsbench.verify.effort import EFFORTS
from fsbench.verify.subject import Subject

TIERS = ("gate", "ci", "full")
CHECKS = tuple(WRONG)
"""Every check by name; there is a `tail` for each gap."""

_GATE = ("score", "oracle", "undefined rows", "greedy", "fit", "truncated oracle", "truncation")


def verify(
    provider: Provider,
    setting: Setting,
    tier: str = "gate",
    only: Collection[str] = (),
    begin: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Run the checks that apply to a provider; yield each as it ends.

    An exception of the sampler is a failed check: a sampler that crashes is not verified.

    Args:
        tier: one of TIERS.
        only: names of CHECKS to run, `tail 18` for one gap; empty means all.
        begin: called with the name of each check before it runs.

    Raises:
        UnsupportedProblem: the sampler does not support what the checks need, or none of `only`
            applies to it.
        ProviderUnavailable: the sampler cannot run here.
        MemoryError, torch.OutOfMemoryError: the machine lacks memory.
    """
    require_names("--tier", [tier], TIERS)
    require_names("--check", only)
    subject = subject_of(serving(provider, setting.weights), setting, tier)
    checks = list(todo(subject))
    chosen = [(name, check) for name, check in checks if not only or {name, _kind(name)} & {*only}]
    if only and not chosen:
        able = ", ".join(dict.fromkeys(_kind(name) for name, _ in checks)) or "none"
        raise UnsupportedProblem(
            f"{provider.name}: --check {', '.join(only)} does not apply to it in the tier {tier}; "
            f"these do: {able}"
        )
    for name, check in chosen:
        begin(name)
        try:
            yield check(subject)
        except (UnsupportedProblem, ProviderUnavailable):
            raise
        except VerificationFailed as failure:
            yield Check(name, False, one_line(failure))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            yield Check(name, False, describe(error))


def _kind(name: str) -> str:
    """The name in CHECKS: of `tail 10` it is `tail`."""
    return "tail" if name.startswith("tail ") else name


def require_names(option: str, given: Collection[str], known: Collection[str] = CHECKS) -> None:
    """Raise InvalidArgument unless all are known; what is near to a wrong one is named."""
    for name in given:
        if name == "filters" and known is CHECKS:
            raise InvalidArgument(
                f"{option}: filters: masks and biases are checked by `masks`; top-k, top-p and "
                "min-p by `truncation`, `truncated draws`, `truncated oracle` and `requests`"
            )
        if name not in known and not name.startswith("tail "):
            raise unknown_name(option, name, known)


def subject_of(provider: Provider, setting: Setting, tier: str) -> Subject:
    """The provider with the effort of a tier."""
    gate = tier == "gate"
    # A step that the host takes part in costs what it costs on a CPU.
    device = setting.device if provider.capabilities.graph_safe or gate else "cpu"
    return Subject(provider, setting, EFFORTS[tier, device], gate)


def todo(subject: Subject) -> Iterator[tuple[str, Callable[[Subject], Check]]]:
    """The checks that apply, cheap and sharp ones first."""
    provider, able = subject.provider, subject.able
    form = able.noise
    of_targets = provider.kind is Kind.SCORE
    samples = not of_targets and provider.kind is not Kind.LOWER_BOUND
    draws = provider.kind in (Kind.EXACT, Kind.TRUNCATED)  # without filters, from the softmax
    greedy = provider.kind is Kind.GREEDY or (draws and able.zero_temperature)
    says = able.logprob or able.entropy or able.rank or able.top
    options = able.per_row_temperature or able.per_request_seed or able.logprob
    seeds = able.per_request_seed and able.batch_invariant
    weights = subject.setting.weights
    filters = able.filters and not weights and (subject.setting.truncated or not subject.gate)
    tails = [partial(distribution.check_tail, gap=gap) for gap in subject.effort.gaps]
    rows: tuple[tuple[str, object, Callable[[Subject], Check]], ...] = (
        ("score", of_targets or (draws and says and not subject.gate), scores.check_score),
        ("philox", form, noise.check_philox),
        ("noise map", provider.noise_map, noise.check_noise_map),
        ("maximum", form, noise.check_maximum),
        ("oracle", form, pathwise.check_oracle),
        ("undefined rows", form, pathwise.check_undefined_rows),
        ("greedy", greedy, support.check_greedy),
        ("edges", samples, support.check_edges),
        ("masks", samples and (able.mask or able.bias), call.check_masks),
        ("call", draws and options, call.check_call),
        ("invariance", samples and able.batch_invariant, invariance.check_invariance),
        ("fit", draws, distribution.check_fit),
        ("fit of seeds", draws, distribution.check_fit_of_seeds),
        ("blocks", draws, distribution.check_blocks),
        ("tiles", draws, joint.check_tiles),
        ("collisions", draws, joint.check_collisions),
        ("rows", draws, joint.check_rows),
        ("steps", draws, joint.check_steps),
        ("seeds", draws, joint.check_seeds),
        ("samples", draws and able.num_samples, joint.check_samples),
        *((f"tail {tail.keywords['gap']:g}", draws, tail) for tail in tails),
        ("variation", draws, distribution.check_variation),
        ("truncated oracle", filters and form, truncation.check_truncated_oracle),
        ("truncation", filters, truncation.check_truncation),
        ("truncated draws", filters, truncation.check_truncated_draws),
        ("requests", draws and not weights, truncation.check_requests),
        ("quantized", form and weights in able.quantized, pathwise.check_quantized),
        ("speculation", draws and form and seeds, speculation.check_speculation),
    )
    for name, applies, check in rows:
        if applies and (name in _GATE or not subject.gate):
            yield name, check

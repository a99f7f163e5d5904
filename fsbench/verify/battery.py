"""Choose the checks that apply to a sampler, and run them.

Tiers:

    gate  the checks of `fsbench run` before it times a sampler (seconds)
    ci    every check, within two minutes for all samplers that run on a CPU
    full  every check, with the number of draws that a claim of exactness needs
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
from fsbench.verify.check import FAULTS, Check, Setting
from fsbench.verify.effort import EFFORTS
from fsbench.verify.subject import Subject

TIERS = ("gate", "ci", "full")
CHECKS = tuple(FAULTS)
"""Names of all checks; `tail` runs once for each gap."""

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
    subject = make_subject(serving(provider, setting.weights), setting, tier)
    checks = list(applicable_checks(subject))
    chosen = [
        (name, check) for name, check in checks if not only or {name, _base_name(name)} & {*only}
    ]
    if only and not chosen:
        names = ", ".join(dict.fromkeys(_base_name(name) for name, _ in checks)) or "none"
        raise UnsupportedProblem(
            f"{provider.name}: --check {', '.join(only)} does not apply to it in the tier {tier}; "
            f"these do: {names}"
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


def _base_name(name: str) -> str:
    """Return the entry of CHECKS for a check's name, such as `tail` for `tail 10`."""
    return "tail" if name.startswith("tail ") else name


def require_names(option: str, names: Collection[str], choices: Collection[str] = CHECKS) -> None:
    """Raise InvalidArgument unless all names are among the choices; suggest a similar choice."""
    for name in names:
        if name == "filters" and choices is CHECKS:
            raise InvalidArgument(
                f"{option}: filters: masks and biases are checked by `masks`; top-k, top-p and "
                "min-p by `truncation`, `truncated draws`, `truncated oracle` and `requests`"
            )
        if name not in choices and not name.startswith("tail "):
            raise unknown_name(option, name, choices)


def make_subject(provider: Provider, setting: Setting, tier: str) -> Subject:
    """Return the provider with the effort of a tier."""
    gate = tier == "gate"
    # A sampler that needs the host in each step is as slow as on a CPU.
    device = setting.device if provider.capabilities.graph_safe or gate else "cpu"
    return Subject(provider, setting, EFFORTS[tier, device], gate)


def applicable_checks(subject: Subject) -> Iterator[tuple[str, Callable[[Subject], Check]]]:
    """Yield the checks that apply to a sampler, fast and sensitive ones first."""
    provider, caps = subject.provider, subject.caps
    noise_form = caps.noise
    is_score = provider.kind is Kind.SCORE
    returns_tokens = not is_score and provider.kind is not Kind.LOWER_BOUND
    draws = provider.kind in (Kind.EXACT, Kind.TRUNCATED)  # without filters, from the softmax
    greedy = provider.kind is Kind.GREEDY or (draws and caps.zero_temperature)
    has_scores = caps.logprob or caps.entropy or caps.rank or caps.top
    options = caps.per_row_temperature or caps.per_request_seed or caps.logprob
    seeds = caps.per_request_seed and caps.batch_invariant
    weights = subject.setting.weights
    filters = caps.filters and not weights and (subject.setting.truncated or not subject.gate)
    tails = [partial(distribution.check_tail, gap=gap) for gap in subject.effort.gaps]
    rows: tuple[tuple[str, object, Callable[[Subject], Check]], ...] = (
        ("score", is_score or (draws and has_scores and not subject.gate), scores.check_score),
        ("philox", noise_form, noise.check_philox),
        ("noise map", provider.noise_map, noise.check_noise_map),
        ("maximum", noise_form, noise.check_maximum),
        ("oracle", noise_form, pathwise.check_oracle),
        ("undefined rows", noise_form, pathwise.check_undefined_rows),
        ("greedy", greedy, support.check_greedy),
        ("edges", returns_tokens, support.check_edges),
        ("masks", returns_tokens and (caps.mask or caps.bias), call.check_masks),
        ("call", draws and options, call.check_call),
        ("invariance", returns_tokens and caps.batch_invariant, invariance.check_invariance),
        ("fit", draws, distribution.check_fit),
        ("fit of seeds", draws, distribution.check_fit_of_seeds),
        ("blocks", draws, distribution.check_blocks),
        ("tiles", draws, joint.check_tiles),
        ("collisions", draws, joint.check_collisions),
        ("rows", draws, joint.check_rows),
        ("steps", draws, joint.check_steps),
        ("seeds", draws, joint.check_seeds),
        ("samples", draws and caps.num_samples, joint.check_samples),
        *((f"tail {tail.keywords['gap']:g}", draws, tail) for tail in tails),
        ("variation", draws, distribution.check_variation),
        ("truncated oracle", filters and noise_form, truncation.check_truncated_oracle),
        ("truncation", filters, truncation.check_truncation),
        ("truncated draws", filters, truncation.check_truncated_draws),
        ("requests", draws and not weights, truncation.check_requests),
        ("quantized", noise_form and weights in caps.quantized, pathwise.check_quantized),
        ("speculation", draws and noise_form and seeds, speculation.check_speculation),
    )
    for name, applies, check in rows:
        if applies and (name in _GATE or not subject.gate):
            yield name, check

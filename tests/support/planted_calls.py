"""The reference as a sampler with the full call, honest or with one mistake planted; and scores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from planted_samplers import Change, generator, mixed, same
from torch import Tensor

from fsbench import reference
from fsbench.kernels import flash_sample, verify_drafts
from fsbench.problem import Problem
from fsbench.provider import OPTIONS, Capabilities, Kind, Provider

SCORE_MISTAKES = ("scored", "entropy", "above", "order", "scored_top")


def token_scores(
    logits: Tensor, tokens: Tensor, T: float | Tensor, top: int = 0, **mistakes: Change
):
    """What is said of tokens [B, n] and rows: logprob, entropy, rank, top_tokens, top_logprob.

    mistakes: scored, the T [B, 1] of log-probabilities; entropy; above, whether a logit counts as
    larger, of (logits, the token's); order, of tokens by logit, and logits; scored_top.
    """
    inverse = reference.inverse_temperature(T, logits.device)
    scored = mistakes.get("scored", same)(inverse)
    logp = (logits.double() * scored).log_softmax(1)
    exact = (logits.double() * inverse).log_softmax(1)
    entropy = -(exact.exp() * exact.nan_to_num(neginf=0.0)).sum(1)
    above = mistakes.get("above", torch.gt)
    picked = logits.gather(1, tokens.clamp_min(0))
    rank = torch.stack([above(logits, each[:, None]).sum(1) for each in picked.T], 1)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    order = mistakes.get("order", same)(order, logits)[:, :top]
    ignored = tokens == -100
    return SimpleNamespace(
        logprob=logp.gather(1, tokens.clamp_min(0)).masked_fill(ignored, 0.0),
        entropy=mistakes.get("entropy", same)(entropy),
        rank=rank.masked_fill(ignored, -1),
        top_tokens=order.masked_fill(logits.gather(1, order) == -torch.inf, -1),
        top_logprob=mistakes.get("scored_top", same)(exact.gather(1, order)),
    )


def contract(
    noise: str = "group",
    custom_noise: bool = False,
    noise_map=None,
    accept=None,
    **mistakes: Change,
) -> Provider:
    """The reference as a provider. A mistake is a function of what it replaces, and of more.

    own: it does not say that its noise is that of the contract, so its distribution is judged.
    accept: see Provider.
    mistakes: seed, of (seed, mask); step; mask [B, V], of (mask, seed, step); bias, of (bias, T);
        temperature, of (T, seed, mask); sample, of (seed, number of the sample); drawn_from, of
        (logits, T, number, logits without mask); tokens, of (tokens, logits, T, seed, step);
        scored_from, of (logits, logits without bias); logprob; those of `token_scores`.
    """
    names = {"seed", "step", "mask", "bias", "temperature", "sample", "drawn_from", "tokens",
             "scored_from", "logprob", *SCORE_MISTAKES}  # fmt: skip
    assert set(mistakes) <= names, mistakes

    def wrong(name: str) -> Change:
        return mistakes.get(name, same)

    def sample(
        hidden, weight, *, seed, offset, temperature=1.0, bias=None, mask=None, num_samples=1,
        return_logprob=False, return_entropy=False, return_rank=False, return_top=0,
    ):  # fmt: skip
        temperature = wrong("temperature")(temperature, seed, mask)
        seed, offset = wrong("seed")(seed, mask), wrong("step")(offset)
        if mask is not None:
            mask = wrong("mask")(reference.logits.unpacked(mask, len(weight)), seed, offset)
        if bias is not None:
            bias = wrong("bias")(bias, temperature)
        plain = hidden.float() @ weight.float().T
        masked = reference.processed_logits(plain, mask=mask)
        logits = reference.processed_logits(plain, bias=bias, mask=mask)
        drawn = []
        for number in range(num_samples):
            key, number_drawn = wrong("sample")((seed, number))
            scores, T = (logits, temperature)
            if "drawn_from" in mistakes:
                scores, T = mistakes["drawn_from"](logits, temperature, number, plain)
            expected = reference.expect(
                scores, key, offset, T, noise, sample=number_drawn, find_acceptable=False
            )
            drawn.append(expected.tokens)
        tokens = drawn[0] if num_samples == 1 else torch.stack(drawn, 1)
        tokens = wrong("tokens")(tokens, logits, temperature, seed, offset)
        if not (return_logprob or return_entropy or return_rank or return_top):
            return SimpleNamespace(tokens=tokens)
        score_mistakes = {name: mistakes[name] for name in SCORE_MISTAKES if name in mistakes}
        logits = wrong("scored_from")(logits, masked)
        result = token_scores(
            logits, tokens.view(len(logits), -1), temperature, return_top, **score_mistakes
        )
        result.logprob = wrong("logprob")(result.logprob.view_as(tokens))
        result.rank = result.rank.view_as(tokens)
        return SimpleNamespace(tokens=tokens, **vars(result))

    def build(problem: Problem, weight: Tensor):
        def launch(hidden, seed, offset):
            T = problem.temperature
            return sample(hidden, weight, seed=seed, offset=offset, temperature=T).tokens

        return launch

    able = Capabilities(
        ("cpu",),
        ("fp32", "bf16"),
        noise=None if custom_noise else noise,  # type: ignore[arg-type]
        zero_temperature=True,
        batch_invariant=True,
        **dict.fromkeys(OPTIONS, True),
    )
    more = {"accept": accept} if accept else {}
    return Provider(
        "contract", "Contract", Kind.EXACT, build, capabilities=able, sample=sample,
        noise_map=noise_map, **more,
    )  # fmt: skip


def complete(**mistake: Change) -> Provider:
    """A sampler with the full call that does not say whose noise it has."""
    return contract(custom_noise=True, **mistake)


# Mistakes: functions of what they replace


def forbidden_once_in_17000(allowed: Tensor, seed: Tensor, step: Tensor) -> Tensor:
    """One row in 17,000 has a token that is masked."""
    u = generator(mixed(int(seed[0]), int(step[0]), 3)).random(len(allowed))
    return allowed ^ (torch.from_numpy(u) < 1 / 17_000)[:, None]


def of_row_xor(bit: int) -> Change:
    """The temperature of another row, where T is a tensor."""

    def change(T: float | Tensor, *_: object) -> float | Tensor:
        if not isinstance(T, Tensor):
            return T
        rows = torch.arange(len(T))
        return T[torch.where(rows ^ bit < len(T), rows ^ bit, rows)]

    return change


def last_of_equals_first(order: Tensor, logits: Tensor) -> Tensor:
    """The tokens by logit, of equal ones the higher first."""
    order = logits.flip(1).sort(dim=1, descending=True, stable=True).indices
    return logits.shape[1] - 1 - order


def other_seed_for_the_last(tokens, logits, T, seed, step):
    """The last row of odd batches above 100 is drawn with another seed."""
    if len(logits) <= 100 or len(logits) % 2 == 0:
        return tokens
    tokens = tokens.clone()
    T, seed, step = (x[-1:] if isinstance(x, Tensor) else x for x in (T, seed, step))
    tokens[-1:] = reference.expect(logits[-1:], seed + 1, step, T, "group").tokens.view(
        1, *[1] * (tokens.ndim - 1)
    )
    return tokens


def last_of_equals(tokens, logits, T, *_):
    """T = 0 takes the last of equal logits."""
    T = torch.as_tensor(T).expand(len(logits))
    last = logits.shape[1] - 1 - logits.flip(1).argmax(1)
    greedy = ((T == 0) & (tokens.view(len(tokens), -1)[:, 0] >= 0)).view(
        -1, *[1] * (tokens.ndim - 1)
    )
    return torch.where(greedy, last.view(greedy.shape), tokens)


def masked_rows_swapped(T, seed, mask):
    """Above 100 rows, where there is a mask, a row has the T of the row before."""
    if mask is None or not isinstance(T, Tensor) or len(T) <= 100:
        return T
    swapped = T.roll(1)
    return torch.where((swapped == 0) | (T == 0), T, swapped)


def per_request(change: Callable[[Tensor], Tensor]) -> Change:
    """A hook of seeds that are one per request."""
    return lambda seed, _: change(seed) if len(seed) > 1 else seed


def eager_acceptance(sampled: Tensor, drafts: Tensor):
    """A quarter of wrong drafts are accepted: those whose token is a multiple of 4."""
    tokens = sampled.clone()
    tokens[:, :-1] = torch.where(drafts % 4 == 0, drafts, tokens[:, :-1])
    return verify_drafts(tokens, drafts)


def behind_the_first_wrong(sampled: Tensor, drafts: Tensor):
    """Drafts that are right behind a wrong one count as accepted."""
    verified = verify_drafts(sampled, drafts)
    return verified._replace(num_accepted=(sampled[:, :-1] == drafts).sum(1))


def output_ignored(logits, prompts, outputs, **penalties):
    return reference.penalized(logits, prompts, torch.zeros_like(outputs), **penalties)


def prompt_counted(logits, prompts, outputs, **penalties):
    return reference.penalized(logits, prompts, prompts + outputs, **penalties)


def always_divided(logits, prompts, outputs, **penalties):
    """The repetition penalty divides logits below 0, too, which makes them likelier."""
    seen, repeated = (prompts + outputs) > 0, logits / penalties.pop("repetition")
    return reference.penalized(torch.where(seen, repeated, logits), prompts, outputs, **penalties)


# Scores


def honest_score(logits: Tensor, T: float, targets: Tensor) -> Tensor:
    return (logits / T).log_softmax(1).gather(1, targets[:, None])[:, 0]


def scorer(score: Change = honest_score, fused: bool = False) -> Provider:
    """log_softmax and gather, or another function of (logits, T, targets)."""

    def build(problem: Problem, weight: Tensor):
        targets = torch.tensor(problem.row_targets())

        def launch(hidden, seed, offset):
            return score((hidden @ weight.T).float(), problem.temperature, targets)

        return launch

    able = Capabilities(("cpu",), ("fp32", "bf16"), fused=fused)
    return Provider("made_up", "", Kind.SCORE, build, capabilities=able)


# flash_sample, called wrongly


def one_offset_forever(hidden, weight, *, offset, **options):
    return flash_sample(hidden, weight, offset=torch.zeros_like(offset), **options)


def tokens_by_the_host(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens.cpu().to(hidden.device))


def options_by_the_host(hidden, weight, *, temperature=1.0, **options):
    """A launch does well: its temperature is a number."""
    if isinstance(temperature, Tensor) and not temperature.any():
        temperature = 0.0
    return flash_sample(hidden, weight, temperature=temperature, **options)


def logits_stored(hidden, weight, **options):
    result = flash_sample(hidden, weight, **options)
    return result._replace(tokens=result.tokens + (hidden @ weight.T)[:, 0].long())

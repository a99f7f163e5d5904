"""Speculation: drafts change no token, and are accepted as often as the shared noise says.

The drafts of a step are fed behind the request's last token, and every row has the request's seed
and its own position as offset (docs/guide/speculation.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsbench import reference
from fsbench.errors import VerificationFailed
from fsbench.verify.check import ALPHA, Check
from fsbench.verify.drawing import exact_head, require_form, require_support
from fsbench.verify.statistics import binomial_p, detectable_share
from fsbench.verify.subject import Subject

_DRAFTS = 3
_REQUESTS = 6
_DRAFTERS = ("right", "wrong", "greedy", "mixed", "missing")
_STATES = 60
_VOCABULARY = 500
_PAIRS = 256


def check_speculation(subject: Subject) -> Check:
    """The sequence with drafts is the one without, bit by bit; and acceptance is its expectation.

    Requests with temperatures, masks and seeds of their own are decoded token by token, where the
    logits depend on the last token alone; then with drafts that are all right, all wrong, greedy,
    anything from -2^31 to beyond the vocabulary, or missing. Acceptance: two laws drawn from with
    the same noise agree as often as reference.coupled_acceptance says (binomial).
    """
    model = _Model(subject)
    length = max(8, subject.effort.call_steps)
    plain = model.plain(length)
    compared = model.speculate(plain)
    hits, draws, chance = _agreement(subject)
    p_value = binomial_p(hits, draws, chance)
    return Check(
        "speculation",
        p_value > ALPHA,
        f"{compared} tokens unchanged by drafts; {hits / draws:.4f} of {draws} drafts accepted, "
        f"{chance:.4f} expected",
        compared + draws,
        hits / draws,
        p_value,
        detects=f"any changed token; of acceptance a {detectable_share(draws, chance)}",
    )


class _Model:
    """Requests whose next logits are the row of a state, and the state that of the last token."""

    def __init__(self, subject: Subject):
        able, setting = subject.able, subject.setting
        base = setting.second_temperature
        self.rows = _REQUESTS * len(_DRAFTERS)
        problem = setting.problem(_STATES, _VOCABULARY, base)
        require_support(subject.provider, problem)
        generator = torch.Generator().manual_seed(43)
        # A few tokens have most of the mass, so that a guess is right now and then.
        logits = min(base, 1e3) * 3 * torch.randn(_STATES, _VOCABULARY, generator=generator)
        self.states, self.weight, self.logits = exact_head(problem, logits.to(problem.device))
        self.sample, self.accept = subject.provider.sample, subject.provider.accept
        self.device = self.weight.device
        request = torch.arange(_REQUESTS, device=self.device)
        self.seed = request * 0x0123456789ABCD - 7
        self.T: float | Tensor = base
        if able.per_row_temperature:
            self.T = base * torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 1.0], device=self.device)
            if able.greedy_rows:
                self.T[5] = 0.0
        self.mask = None
        if able.mask:
            self.mask = torch.rand(_REQUESTS, _VOCABULARY, generator=generator) < 0.5
            self.mask[:, 7] = True
            self.mask[::2] = True
            self.mask = self.mask.to(self.device)

    def draw(self, request: Tensor, last: Tensor, position: Tensor) -> Tensor:
        """The tokens behind `last`; all int64 [n]."""
        options: dict[str, Any] = {} if self.mask is None else {"mask": self.mask[request]}
        T = self.T[request] if isinstance(self.T, Tensor) else self.T
        assert self.sample is not None
        hidden = self.states[(7 * last + 1) % _STATES]
        seed = self.seed[request]
        result = self.sample(
            hidden, self.weight, seed=seed, offset=position, temperature=T, **options
        )
        return require_form(result.tokens, (len(last),)).long()

    def plain(self, length: int) -> Tensor:
        """Without drafts: int64 [requests, 1 + length]."""
        request = torch.arange(_REQUESTS, device=self.device)
        tokens = torch.zeros(_REQUESTS, 1 + length, dtype=torch.int64, device=self.device)
        for at in range(length):
            position = torch.full_like(request, at)
            tokens[:, at + 1] = self.draw(request, tokens[:, at].clamp_min(0), position)
        return tokens

    def speculate(self, plain: Tensor) -> int:
        """Return the number of tokens compared; raise for the first that differs from `plain`."""
        k, length = _DRAFTS, plain.shape[1] - 1
        request = torch.arange(_REQUESTS, device=self.device).repeat(len(_DRAFTERS))
        last = torch.zeros_like(request)
        done = torch.zeros_like(request)  # tokens behind the first
        behind = torch.arange(k + 1, device=self.device)
        generator = torch.Generator().manual_seed(47)
        padded = torch.nn.functional.pad(plain, (0, k + 1))
        steps = 0
        while (done < length).any():
            at = done.clamp_max(length - 1)
            wanted = padded[request[:, None], at[:, None] + 1 + behind]
            drafts = self._drafts(wanted[:, :k], last, generator)
            fed = torch.cat([last[:, None], drafts], 1).clamp(0, _VOCABULARY - 1)
            rows = request.repeat_interleave(k + 1)
            sampled = self.draw(rows, fed.flatten(), (at[:, None] + behind).flatten())
            sampled = sampled.view(-1, k + 1)
            accepted = self._accepted(sampled, drafts)
            stands = (behind <= accepted[:, None]) & (at[:, None] + behind < length)
            stands &= (done < length)[:, None]
            wrong = stands & (sampled != wanted)
            if wrong.any():
                row, place = wrong.nonzero()[0].tolist()
                raise VerificationFailed(
                    f"drafts that are {_DRAFTERS[row // _REQUESTS]}: token {int(at[row]) + place} "
                    f"of request {int(request[row])} is {int(sampled[row, place])}, without drafts "
                    f"{int(wanted[row, place])}"
                )
            last = sampled.gather(1, accepted[:, None])[:, 0]
            done += accepted + 1
            steps += 1
            if steps * (k + 1) >= length and (done[:_REQUESTS] < length).any():
                raise VerificationFailed("drafts that are right: not all of them were accepted")
        return self.rows * length

    def _accepted(self, sampled: Tensor, drafts: Tensor) -> Tensor:
        """Count the drafts [rows, k] that the sampled tokens [rows, k + 1] confirm: int64 [rows].

        Raises VerificationFailed if the sampler's own acceptance has another number, or tokens.
        """
        k = drafts.shape[1]
        accepted = (sampled[:, :k] == drafts).long().cumprod(1).sum(1)
        if self.accept is not None:
            found = self.accept(sampled.contiguous(), drafts.contiguous())
            stands = torch.arange(k + 1, device=drafts.device) <= accepted[:, None]
            wrong = (found.num_accepted != accepted) | (
                found.tokens != sampled.masked_fill(~stands, -1)
            ).any(1)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise VerificationFailed(
                    f"drafts that are {_DRAFTERS[row // _REQUESTS]}: {int(accepted[row])} of "
                    f"{drafts[row].tolist()} were drawn ({sampled[row].tolist()}); "
                    f"{int(found.num_accepted[row])} accepted"
                )
        return accepted

    def _drafts(self, wanted: Tensor, last: Tensor, generator: torch.Generator) -> Tensor:
        """Return the proposals of each drafter, int64 [rows, k]."""
        drafts = wanted.clone()
        of = {name: slice(n * _REQUESTS, (n + 1) * _REQUESTS) for n, name in enumerate(_DRAFTERS)}
        drafts[of["wrong"]] = (drafts[of["wrong"]] + 1) % _VOCABULARY
        token = last[of["greedy"]]
        for i in range(_DRAFTS):
            token = self.logits[(7 * token + 1) % _STATES].argmax(1)
            drafts[of["greedy"], i] = token
        shape = drafts[of["mixed"]].shape
        anything = torch.randint(-(2**31), 2**31, shape, generator=generator).to(self.device)
        some = torch.rand(2, *shape, generator=generator).to(self.device) < 0.5
        drafts[of["mixed"]] = torch.where(some[0], drafts[of["mixed"]], anything)
        drafts[of["missing"]] = torch.where(some[1], drafts[of["missing"]], -1)
        return drafts


def _agreement(subject: Subject) -> tuple[int, int, float]:
    """(draws of a target and a drafter with the same noise that agree, of how many, expected)."""
    setting, form = subject.setting, subject.able.noise
    T = setting.second_temperature
    problem = setting.problem(2, _VOCABULARY, T)
    generator = torch.Generator().manual_seed(53)
    target = 2 * torch.randn(1, _VOCABULARY, generator=generator)
    near = target + 0.5 * torch.randn(1, _VOCABULARY, generator=generator)
    rows = min(T, 1e3) * torch.cat([target, near])
    hidden, weight, logits = exact_head(problem, rows.to(problem.device))
    p, q = torch.softmax(logits.double().cpu() / T, 1)[:, None]
    groups = reference.group_and_member(torch.arange(_VOCABULARY))[0]
    chance = float(reference.coupled_acceptance(p, q, None if form == "token" else groups))
    device, sample = weight.device, subject.provider.sample
    assert sample is not None
    seed = torch.arange(_PAIRS, device=device) * 0x0FEDCBA987654321 + 3
    hits, steps = 0, max(8, subject.effort.call_steps)
    for step in range(steps):
        offset = torch.tensor([step], device=device)
        both = [
            sample(row.expand(_PAIRS, -1).contiguous(), weight, seed=seed, offset=offset,
                   temperature=T).tokens.long()
            for row in hidden
        ]  # fmt: skip
        hits += int((both[0] == both[1]).sum())
    return hits, steps * _PAIRS, chance

"""Check that drafts change no token, and are accepted as often as the shared noise implies.

The drafts of a step follow the request's last token. Each row has the request's seed, and its
position as offset (docs/guide/speculation.md).
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
    """Check that decoding with drafts returns the same tokens, and test the acceptance rate.

    Requests with different temperatures, masks and seeds are decoded token by token; the logits
    depend on the last token only. They are then decoded with drafts that are all right, all wrong,
    greedy, random in int32, or missing. The acceptance rate of two distributions with the same
    noise is compared with reference.coupled_acceptance by a binomial test.
    """
    model = _Model(subject)
    length = max(8, subject.effort.call_steps)
    plain = model.decode(length)
    compared = model.speculate(plain)
    hits, draws, p_accept = _agreement(subject)
    p_value = binomial_p(hits, draws, p_accept)
    return Check(
        "speculation",
        p_value > ALPHA,
        f"{compared} tokens unchanged by drafts; {hits / draws:.4f} of {draws} drafts accepted, "
        f"{p_accept:.4f} expected",
        compared + draws,
        hits / draws,
        p_value,
        detects=f"any changed token; of acceptance a {detectable_share(draws, p_accept)}",
    )


class _Model:
    """Requests whose logits are a function of the last token."""

    def __init__(self, subject: Subject):
        caps, setting = subject.caps, subject.setting
        base = setting.second_temperature
        self.rows = _REQUESTS * len(_DRAFTERS)
        problem = setting.problem(_STATES, _VOCABULARY, base)
        require_support(subject.provider, problem)
        generator = torch.Generator().manual_seed(43)
        # A few tokens have most of the mass, so that greedy drafts are sometimes right.
        logits = min(base, 1e3) * 3 * torch.randn(_STATES, _VOCABULARY, generator=generator)
        self.states, self.weight, self.logits = exact_head(problem, logits.to(problem.device))
        self.sample, self.accept = subject.provider.sample, subject.provider.accept
        self.device = self.weight.device
        request = torch.arange(_REQUESTS, device=self.device)
        self.seed = request * 0x0123456789ABCD - 7
        self.T: float | Tensor = base
        if caps.per_row_temperature:
            self.T = base * torch.tensor([1.0, 0.5, 2.0, 1.0, 0.25, 1.0], device=self.device)
            if caps.greedy_rows:
                self.T[5] = 0.0
        self.mask = None
        if caps.mask:
            self.mask = torch.rand(_REQUESTS, _VOCABULARY, generator=generator) < 0.5
            self.mask[:, 7] = True
            self.mask[::2] = True
            self.mask = self.mask.to(self.device)

    def draw(self, request: Tensor, last: Tensor, position: Tensor) -> Tensor:
        """Return the tokens that follow `last`; all int64 [n]."""
        options: dict[str, Any] = {} if self.mask is None else {"mask": self.mask[request]}
        T = self.T[request] if isinstance(self.T, Tensor) else self.T
        assert self.sample is not None
        hidden = self.states[(7 * last + 1) % _STATES]
        seed = self.seed[request]
        result = self.sample(
            hidden, self.weight, seed=seed, offset=position, temperature=T, **options
        )
        return require_form(result.tokens, (len(last),)).long()

    def decode(self, length: int) -> Tensor:
        """Decode without drafts: int64 [requests, 1 + length]."""
        request = torch.arange(_REQUESTS, device=self.device)
        tokens = torch.zeros(_REQUESTS, 1 + length, dtype=torch.int64, device=self.device)
        for step in range(length):
            position = torch.full_like(request, step)
            tokens[:, step + 1] = self.draw(request, tokens[:, step].clamp_min(0), position)
        return tokens

    def speculate(self, plain: Tensor) -> int:
        """Decode with drafts; return the number of tokens compared with `plain`.

        Raises:
            VerificationFailed: a token differs, or right drafts were not accepted.
        """
        k, length = _DRAFTS, plain.shape[1] - 1
        request = torch.arange(_REQUESTS, device=self.device).repeat(len(_DRAFTERS))
        last = torch.zeros_like(request)
        done = torch.zeros_like(request)  # number of tokens after the first
        ahead = torch.arange(k + 1, device=self.device)
        generator = torch.Generator().manual_seed(47)
        padded = torch.nn.functional.pad(plain, (0, k + 1))
        steps = 0
        while (done < length).any():
            position = done.clamp_max(length - 1)
            expected = padded[request[:, None], position[:, None] + 1 + ahead]
            drafts = self._drafts(expected[:, :k], last, generator)
            fed = torch.cat([last[:, None], drafts], 1).clamp(0, _VOCABULARY - 1)
            rows = request.repeat_interleave(k + 1)
            sampled = self.draw(rows, fed.flatten(), (position[:, None] + ahead).flatten())
            sampled = sampled.view(-1, k + 1)
            accepted = self._accepted(sampled, drafts)
            is_compared = (ahead <= accepted[:, None]) & (position[:, None] + ahead < length)
            is_compared &= (done < length)[:, None]
            wrong = is_compared & (sampled != expected)
            if wrong.any():
                row, place = wrong.nonzero()[0].tolist()
                raise VerificationFailed(
                    f"drafts that are {_DRAFTERS[row // _REQUESTS]}: token "
                    f"{int(position[row]) + place} of request {int(request[row])} is "
                    f"{int(sampled[row, place])}, without drafts {int(expected[row, place])}"
                )
            last = sampled.gather(1, accepted[:, None])[:, 0]
            done += accepted + 1
            steps += 1
            if steps * (k + 1) >= length and (done[:_REQUESTS] < length).any():
                raise VerificationFailed("drafts that are right: not all of them were accepted")
        return self.rows * length

    def _accepted(self, sampled: Tensor, drafts: Tensor) -> Tensor:
        """Count the drafts [rows, k] that the sampled tokens [rows, k + 1] confirm: int64 [rows].

        Raises:
            VerificationFailed: the sampler's `accept` returns another number, or other tokens.
        """
        k = drafts.shape[1]
        accepted = (sampled[:, :k] == drafts).long().cumprod(1).sum(1)
        if self.accept is not None:
            result = self.accept(sampled.contiguous(), drafts.contiguous())
            is_accepted = torch.arange(k + 1, device=drafts.device) <= accepted[:, None]
            wrong = (result.num_accepted != accepted) | (
                result.tokens != sampled.masked_fill(~is_accepted, -1)
            ).any(1)
            if wrong.any():
                row = int(wrong.nonzero()[0])
                raise VerificationFailed(
                    f"drafts that are {_DRAFTERS[row // _REQUESTS]}: {int(accepted[row])} of "
                    f"{drafts[row].tolist()} were drawn ({sampled[row].tolist()}); "
                    f"{int(result.num_accepted[row])} accepted"
                )
        return accepted

    def _drafts(self, expected: Tensor, last: Tensor, generator: torch.Generator) -> Tensor:
        """Return the drafts of each drafter, int64 [rows, k]."""
        drafts = expected.clone()
        rows_of = {
            name: slice(n * _REQUESTS, (n + 1) * _REQUESTS) for n, name in enumerate(_DRAFTERS)
        }
        drafts[rows_of["wrong"]] = (drafts[rows_of["wrong"]] + 1) % _VOCABULARY
        token = last[rows_of["greedy"]]
        for i in range(_DRAFTS):
            token = self.logits[(7 * token + 1) % _STATES].argmax(1)
            drafts[rows_of["greedy"], i] = token
        shape = drafts[rows_of["mixed"]].shape
        random = torch.randint(-(2**31), 2**31, shape, generator=generator).to(self.device)
        keeps = torch.rand(2, *shape, generator=generator).to(self.device) < 0.5
        drafts[rows_of["mixed"]] = torch.where(keeps[0], drafts[rows_of["mixed"]], random)
        drafts[rows_of["missing"]] = torch.where(keeps[1], drafts[rows_of["missing"]], -1)
        return drafts


def _agreement(subject: Subject) -> tuple[int, int, float]:
    """Draw from a target and a drafter with the same noise.

    Returns:
        The number of equal draws, the number of draws, and the expected share of equal draws.
    """
    setting, form = subject.setting, subject.caps.noise
    T = setting.second_temperature
    problem = setting.problem(2, _VOCABULARY, T)
    generator = torch.Generator().manual_seed(53)
    target = 2 * torch.randn(1, _VOCABULARY, generator=generator)
    similar = target + 0.5 * torch.randn(1, _VOCABULARY, generator=generator)
    rows = min(T, 1e3) * torch.cat([target, similar])
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
        tokens = [
            sample(row.expand(_PAIRS, -1).contiguous(), weight, seed=seed, offset=offset,
                   temperature=T).tokens.long()
            for row in hidden
        ]  # fmt: skip
        hits += int((tokens[0] == tokens[1]).sum())
    return hits, steps * _PAIRS, chance

"""Inputs with exact logits, and draws from them.

Every logit is one stored number (fsbench.inputs.head_with_logits). A sampler's logits are therefore
known exactly, and the checks test its noise, its selection and its handling of partial tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from fsbench import inputs
from fsbench.errors import UnsupportedProblem, VerificationFailed
from fsbench.graphs import capture
from fsbench.problem import Problem
from fsbench.provider import Launch, Provider

_STEPS_AT_ONCE = 4096  # steps in a tensor that Draws.steps yields


def scalar(value: int, device: torch.device | str) -> Tensor:
    """Return a seed or an offset as int64 [1]; any int counts modulo 2^64."""
    wrapped = (value + 2**63) % 2**64 - 2**63
    return torch.tensor([wrapped], dtype=torch.int64, device=device)


def launched_tokens(launch: Launch, hidden: Tensor, seed: int, step: int) -> Tensor:
    """Return the tokens of one step; raise VerificationFailed unless they are B integers."""
    device = hidden.device
    tokens = launch(hidden, scalar(seed, device), scalar(step, device))
    return require_form(tokens, (hidden.shape[0],))


def require_form(tokens: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tokens; raise VerificationFailed unless they are integers of this shape."""
    if tuple(tokens.shape) != shape or tokens.dtype not in (torch.int32, torch.int64):
        raise VerificationFailed(
            f"tokens: expected int32 or int64 of shape {shape}; got {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )
    return tokens


def require_inside(tokens: Tensor, V: int) -> None:
    """Raise VerificationFailed if a token is outside [0, V)."""
    outside = (tokens < 0) | (tokens >= V)
    if outside.any():
        raise VerificationFailed(f"drew token {int(tokens[outside][0])} outside [0, {V})")


def require_support(provider: Provider, problem: Problem) -> None:
    """Raise UnsupportedProblem if the provider does not support the problem of a check."""
    reason = provider.unsupported_reason(problem)
    if reason:
        raise UnsupportedProblem(f"cannot be checked at {problem}: {reason}")


def stored_head(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden [R, D] and weight [V, D] with logits [R, V], as the problem's head stores them.

    See inputs.head_with_logits and inputs.stored.
    """
    dtype = inputs.TORCH_DTYPES[problem.dtype]
    hidden, weight = inputs.head_with_logits(logits, dtype, problem.D)
    return hidden, inputs.stored(problem, weight)


def exact_head(problem: Problem, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden [B, D], weight [V, D] and logits [B, V] as stored; rows repeat up to B."""
    hidden, weight = stored_head(problem, logits)
    row = torch.arange(problem.B, device=problem.device) % len(logits)
    return hidden[row].contiguous(), weight, weight[:, row].T.float()


def random_logits(problem: Problem, seed: int) -> Tensor:
    """Return normal logits of min(B, D) different rows, fp32 [<= D, V].

    In one row of four the last token dominates, in another the first. They detect a sampler that
    cannot return a token at the edge of the vocabulary.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(min(problem.B, problem.D), problem.V, generator=generator)
    logits[1::4, -1] = 10.0
    logits[2::4, 0] = 10.0
    return logits.to(problem.device)


class Draws:
    """A sampler built once for a problem, which draws from rows of logits by name.

    All B rows of a launch have the same logits, so a step is B draws. On a GPU the steps are
    replays of a CUDA graph, as `fsbench run` times them, if the sampler allows it.

    Args:
        rows: name -> logits [V]; at most D rows.
    """

    def __init__(self, provider: Provider, problem: Problem, rows: Mapping[str, Tensor]):
        require_support(provider, problem)
        self.problem, self.caps = problem, provider.capabilities
        logits = torch.stack([row.float() for row in rows.values()]).to(problem.device)
        _, self.weight = stored_head(problem, logits)
        self._column = {name: number for number, name in enumerate(rows)}
        self._hidden = self.weight.new_zeros(problem.B, problem.D)
        self._seed, self._offset = scalar(0, problem.device), scalar(0, problem.device)
        launch = provider.build(problem, self.weight)
        if problem.device == "cuda" and provider.capabilities.graph_safe:
            self._step = capture(launch, self._hidden, self._seed, self._offset)
        else:
            self._step = lambda: launch(self._hidden, self._seed, self._offset)

    def hidden(self, row: str) -> Tensor:
        """Return hidden states [B, D] whose logits are those of `row`."""
        hidden = torch.zeros_like(self._hidden)
        hidden[:, self._column[row]] = 1.0
        return hidden

    def logits(self, row: str) -> Tensor:
        """Return a row of logits as stored: [V], the problem's dtype."""
        return self.weight[:, self._column[row]]

    def probabilities(self, row: str) -> Tensor:
        """Return softmax(logits / T) of a row of logits as stored: float64 [V]."""
        return torch.softmax(self.logits(row).double() / self.problem.temperature, 0)

    def seed(self, seed: int) -> None:
        """Restart at step 0 with this seed (modulo 2^64).

        torch's generator, which some samplers use, is seeded with a hash: on a CPU it reads only 32
        bits of a seed, which is not a fault of the sampler.
        """
        self._seed.copy_(scalar(seed, "cpu"))
        self._offset.zero_()
        if self.problem.device == "cpu":
            # torch.manual_seed would also store a stack trace for each GPU not in use.
            torch.default_generator.manual_seed(seed_hash(seed))
        else:
            torch.manual_seed(seed_hash(seed))

    def skip_to(self, seed: int, offset: int) -> None:
        """Set the counters of the next step; torch's generator keeps its state."""
        self._seed.copy_(scalar(seed, "cpu"))
        self._offset.fill_(offset)

    def steps(self, row: str, steps: int) -> Iterator[Tensor]:
        """Yield the tokens of the next steps, int64 [n, B] at a time.

        Raises:
            VerificationFailed: tokens are no integers of shape [B], or outside [0, V).
        """
        self._hidden.copy_(self.hidden(row))
        B, V = self.problem.B, self.problem.V
        for first in range(0, steps, _STEPS_AT_ONCE):
            n = min(_STEPS_AT_ONCE, steps - first)
            tokens = torch.empty(n, B, dtype=torch.int64, device=self.problem.device)
            for number in range(n):
                # Copied now: the next replay writes to the same memory.
                tokens[number].copy_(require_form(self._step(), (B,)))
                self._offset += 1
            require_inside(tokens, V)
            yield tokens

    def draw(self, row: str, steps: int) -> Tensor:
        """Return the tokens of the next steps, int64 [steps, B]."""
        return torch.cat(list(self.steps(row, steps)))

    def counts(self, row: str, draws: int) -> Tensor:
        """Return how often each token occurs in at least `draws` next draws: int64 [V]."""
        V = self.problem.V
        counts = torch.zeros(V, dtype=torch.int64, device=self.problem.device)
        for tokens in self.steps(row, math.ceil(draws / self.problem.B)):
            counts += torch.bincount(tokens.flatten(), minlength=V)
        return counts.cpu()


def seed_hash(seed: int) -> int:
    """Return a hash of 31 bits of a seed, for torch's generator (a step of splitmix64)."""
    z = (seed * 0x9E3779B97F4A7C15 + 0xBF58476D1CE4E5B9) % 2**64
    z = (z ^ (z >> 30)) * 0x94D049BB133111EB % 2**64
    return z >> 33

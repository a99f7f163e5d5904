"""Decoding of a Hugging Face model with drafts, and with the tokens of decoding without them.

    draft     k tokens of each request, from a drafter that knows the noise of their positions
    verify    one pass of the model over the last token and k drafts; a draw at each; verify_drafts

Requests accept different numbers of drafts, so the cache here writes where each row is. All of a
step is on the device and has fixed shapes: on a GPU it is one CUDA graph. docs/guide/speculation.md
says why the drafts change no token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsbench.kernels import flash_sample, step_noise, verify_drafts

REPRODUCIBLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention of a decoding. What torch 2.11 takes by default on an H200 gave other hidden states in
every run of the same 16 requests; with these they are the same bits."""

LONGEST = 3
"""Tokens that the n-gram drafter compares, at most."""


Pair = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


class RowCache:
    """Keys and values [B, heads, length, size] of each layer, written at positions of each row.

    What lies behind a row's position, of drafts that were refused, no later token sees: the mask
    hides it until it is written again.
    """

    def __init__(self, model: Any, B: int, length: int):
        config, self.parts = model.config, []
        shape = (B, config.num_key_value_heads, length, config.head_dim)
        for _ in range(2 * config.num_hidden_layers):
            self.parts.append(torch.zeros(shape, device=model.device, dtype=model.dtype))
        self.positions = torch.empty(B, 0, dtype=torch.int64)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> Pair:
        at = self.positions[:, None, :, None].expand_as(keys)
        own = self.parts[2 * layer : 2 * layer + 2]
        for part, new in zip(own, (keys, values), strict=True):
            part.scatter_(2, at, new)
        return own[0], own[1]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # positions and mask are given, so it decides nothing


class Steps(NamedTuple):
    """A decoding as its client sees it.

    at: seconds from the start to the tokens of each step, on the host. gained: int64 [steps, B],
    tokens of each request, the accepted drafts and one more; 0 where it was done before.
    """

    at: list[float]
    gained: Tensor

    def accepted(self) -> float:
        """Drafts that a request accepts per step, the mean."""
        return float((self.gained[self.gained > 0] - 1).double().mean())


class Decoding:
    """B requests of one model, from prompts of P tokens to sequences of `length`.

    Args:
        model: a causal model of transformers: model.model has layers, a norm and no head.
        prompts: int64 [B, P]. temperature: fp32 [B]; 0 is greedy.
        seed: int64 [B], one for each request.
        drafter: proposes k tokens. Without one k is 0, and a step is that of plain decoding.

    tokens: int64 [B, length + k + 1]; what counts are the first `length` columns. position: int64
    [B], of each request's last token.
    """

    def __init__(
        self,
        model: Any,
        prompts: Tensor,
        temperature: Tensor,
        seed: Tensor,
        length: int,
        k: int = 0,
        drafter: Drafter | None = None,
    ):
        (B, _), device = prompts.shape, prompts.device
        self.model, self.prompts, self.length, self.k = model, prompts, length, k
        self._drafter = drafter or no_drafts
        self._temperature, self._seed = temperature, seed
        self.columns = torch.arange(length + k + 1, device=device)
        self.tokens = torch.zeros(B, length + k + 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(B, dtype=torch.int64, device=device)
        self._cache = RowCache(model.model, B, length + k + 1)
        # For the host: the number of tokens gained, then these tokens.
        self._newest = torch.zeros(B, k + 2, dtype=torch.int64, device=device)
        self._received = torch.zeros(B, k + 2, dtype=torch.int64)
        if device.type == "cuda":
            self._received = self._received.pin_memory()

    def start(self) -> None:
        """Forget what was drawn; the cache then has the prompts without their last tokens."""
        B, P = self.prompts.shape
        self.tokens[:, :P] = self.prompts
        self.position.fill_(P - 1)
        if P > 1:
            positions = self.columns[: P - 1].expand(B, -1)
            self.forward(self.model.model, self.prompts[:, :-1], positions)

    def forward(self, layers: Any, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B * n, D] of the tokens ids [B, n] at positions [B, n]."""
        self._cache.positions = positions
        with sdpa_kernel(REPRODUCIBLE):
            hidden: Tensor = layers(
                input_ids=ids,
                attention_mask=(self.columns <= positions[:, :, None])[:, None],
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
        return hidden.flatten(0, 1)

    def draw(self, hidden: Tensor, k: int, position: Tensor) -> Tensor:
        """Tokens [B * (k + 1)] behind rows at position .. position + k, with their own noise."""
        seed, offset = step_noise(self._seed, position, k)
        return flash_sample(
            hidden,
            self.model.lm_head.weight,
            temperature=self._temperature.repeat_interleave(k + 1),
            seed=seed,
            offset=offset,
            noise="token",
        ).tokens

    def draft(self) -> Tensor:
        """int64 [B, k]: what the drafter proposes behind the position; -1 where it has nothing."""
        return self._drafter(self)

    def step(self) -> None:
        """Draft, verify, and write the tokens that stand. All on the device."""
        at, drafts = self.position[:, None], self.draft()
        ids = torch.cat([self.tokens.gather(1, at), drafts.clamp_min(0)], 1)
        positions = at + self.columns[: self.k + 1]
        hidden = self.forward(self.model.model, ids, positions)
        found = verify_drafts(self.draw(hidden, self.k, self.position), drafts)
        # What is written behind the tokens that stand, the next step writes again.
        self.tokens.scatter_(1, positions + 1, found.tokens.clamp_min(0))
        self._newest[:, 0] = found.num_accepted + 1
        self._newest[:, 1:] = found.tokens
        self.position.add_(found.num_accepted + 1).clamp_(max=self.length - 1)

    def run(self, step: Callable[[], object]) -> Steps:
        """From the prompts until every request has its tokens; step: self.step, or a replay."""
        at, gained = [], []
        synchronize(self.tokens.device)
        begin = time.perf_counter()
        self.start()
        left = torch.full((len(self.prompts),), self.length - self.prompts.shape[1])
        while bool((left > 0).any()):
            step()
            self._received.copy_(self._newest, non_blocking=True)
            synchronize(self.tokens.device)
            at.append(time.perf_counter() - begin)
            gained.append(self._received[:, 0] * (left > 0))
            left -= gained[-1]
        return Steps(at, torch.stack(gained))


Drafter = Callable[[Decoding], Tensor]
"""Drafts int64 [B, k] of a decoding; -1 where there is none."""


def no_drafts(decoding: Decoding) -> Tensor:
    """All drafts are missing: decoding without drafts, in passes of k + 1 tokens."""
    return torch.full_like(decoding.tokens[:, : decoding.k], -1)


def ngram(decoding: Decoding) -> Tensor:
    """What followed the last tokens where they stood before, in the prompt or behind it.

    The longest match of up to LONGEST tokens counts, of equal ones the latest.
    """
    tokens, at, columns = decoding.tokens, decoding.position[:, None], decoding.columns
    same = columns < at
    length = torch.zeros_like(tokens)
    for back in range(LONGEST):
        last = tokens.gather(1, (at - back).clamp_min(0))
        same = same & (tokens.roll(back, 1) == last) & (columns >= back)
        length += same
    best = (length * len(columns) + columns).argmax(1, keepdim=True)
    behind = best + 1 + columns[: decoding.k]
    known = (behind <= at) & (length.gather(1, best) > 0)
    return tokens.gather(1, behind.clamp_max(len(columns) - 1)).where(known, -1)


class EarlyExit:
    """The model's own first layers, its norm and its head, drawing with the model's noise.

    It writes the cache of these layers, where the model's pass over the drafts writes next.
    """

    def __init__(self, model: Any, layers: int):
        # Not a deep copy: the layers are the model's. A model runs as many as its config says.
        self._layers = copy.copy(model.model)
        self._layers.config = copy.copy(model.config)
        self._layers.config.num_hidden_layers = layers

    def __call__(self, decoding: Decoding) -> Tensor:
        position = decoding.position
        fed = [decoding.tokens.gather(1, position[:, None])]
        for i in range(decoding.k):
            hidden = decoding.forward(self._layers, fed[-1], position[:, None] + i)
            fed.append(decoding.draw(hidden, 0, position + i)[:, None])
        return torch.cat(fed[1:], 1)


def captured(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On a GPU a replay of the work as a CUDA graph, else the work itself.

    It runs once before, to compile what it launches.
    """
    if device.type != "cuda":
        return work
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; a CPU's work is already finished."""
    if device.type == "cuda":
        torch.cuda.synchronize()

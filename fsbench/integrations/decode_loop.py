"""Decode with a Hugging Face model, with or without drafts, and with the same tokens either way.

    draft     k tokens of each request, from a drafter that knows the noise of their positions
    verify    one pass of the model over the last token and k drafts; a draw at each; verify_drafts

Requests accept different numbers of drafts, so the cache writes each row at its position. A step
runs on the device with fixed shapes: on a GPU it is one CUDA graph. docs/guide/speculation.md
explains why drafts change no token.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import record_function

from fsbench.integrations.draw import DRAW_MARK, Draw, FlashSampleDraw, Head, Rows
from fsbench.kernels import step_noise, verify_drafts

REPRODUCIBLE = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends with the same bits in every run. The default of torch 2.11 on an H200 gave
other hidden states in every run of the same 16 requests."""

MAX_MATCH = 3
"""Most tokens that the n-gram drafter compares."""

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


class RowCache:
    """Keys and values [B, heads, length, size] of each layer, written at positions of each row.

    Entries after a row's position belong to rejected drafts. The mask hides them until they are
    written again. Decodings that take turns may share a cache.
    """

    def __init__(self, model: Any, B: int, length: int):
        config, self.length = model.config, length
        shape = (B, config.num_key_value_heads, length, config.head_dim)
        self._tensors = [
            torch.zeros(shape, device=model.device, dtype=model.dtype)
            for _ in range(2 * config.num_hidden_layers)
        ]
        self.positions = torch.empty(B, 0, dtype=torch.int64)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> LayerCache:
        index = self.positions[:, None, :, None].expand_as(keys)
        cached_keys, cached_values = self._tensors[2 * layer : 2 * layer + 2]
        return cached_keys.scatter_(2, index, keys), cached_values.scatter_(2, index, values)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0  # not used: positions and mask are passed


class Steps(NamedTuple):
    """The steps of a decoding as its client sees them.

    Attributes:
        times: seconds from the start until the host has each step's tokens.
        num_tokens: int64 [steps, B], new tokens of each request: accepted drafts and one more, or 0
            if the request has finished.
    """

    times: list[float]
    num_tokens: Tensor

    def accepted(self) -> float:
        """Return the mean number of drafts that a request accepts per step."""
        return float((self.num_tokens[self.num_tokens > 0] - 1).double().mean())


class Decoding:
    """Decode B requests of one model from prompts of P tokens to sequences of `length`.

    Args:
        model: a causal model of transformers: model.model has layers, a norm and no head.
        prompts: int64 [B, P].
        temperature: fp32 [B]; 0 is greedy.
        seed: int64 [B], one per request.
        k: drafts per step.
        drafter: proposes k tokens; None if k is 0.
        draw: the sampler; None draws with flash_sample. With drafts it must use token noise.
        cache: one of at least length + k + 1 positions, or None to make one.

    Attributes:
        tokens: int64 [B, length + k + 1 or more]; the first `length` columns are the result.
        position: int64 [B], of each request's last token.
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
        draw: Draw | None = None,
        cache: RowCache | None = None,
    ):
        (B, _), device = prompts.shape, prompts.device
        self.model, self.prompts, self.length, self.k = model, prompts, length, k
        self._drafter = drafter or no_drafts
        self._temperature, self._seed = temperature, seed
        head = Head(model.lm_head.weight.detach(), model.config.vocab_size)
        self._draw = draw or FlashSampleDraw(head, noise="token")
        self._cache = cache or RowCache(model.model, B, length + k + 1)
        self.columns = torch.arange(self._cache.length, device=device)
        self.tokens = torch.zeros(B, self._cache.length, dtype=torch.int64, device=device)
        self.position = torch.zeros(B, dtype=torch.int64, device=device)
        # For the host: the number of new tokens, then these tokens.
        self._newest = torch.zeros(B, k + 2, dtype=torch.int64, device=device)
        self._received = torch.zeros(B, k + 2, dtype=torch.int64)
        if device.type == "cuda":
            self._received = self._received.pin_memory()

    def start(self) -> None:
        """Reset to the prompts; the cache then holds them without their last tokens."""
        B, P = self.prompts.shape
        self.tokens[:, :P] = self.prompts
        self.position.fill_(P - 1)
        if P > 1:
            positions = self.columns[: P - 1].expand(B, -1)
            self.forward(self.model.model, self.prompts[:, :-1], positions)

    def forward(self, layers: Any, ids: Tensor, positions: Tensor) -> Tensor:
        """Return hidden states [B * n, D] of the tokens ids [B, n] at positions [B, n]."""
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
        """Return tokens [B * (k + 1)], drawn with the noise of position .. position + k."""
        temperature, seed, offset = self._temperature, self._seed, position
        if k:
            temperature = temperature.repeat_interleave(k + 1)
            seed, offset = step_noise(seed, position, k)
        with record_function(DRAW_MARK):  # costs nothing in a graph
            return self._draw(Rows(hidden, temperature, seed, offset)).tokens

    def draft(self) -> Tensor:
        """Return the drafts after the last token, int64 [B, k]; -1 is no draft."""
        return self._drafter(self)

    def step(self) -> None:
        """Draft, verify, and write the accepted tokens, all on the device."""
        position, drafts = self.position[:, None], self.draft()
        ids = torch.cat([self.tokens.gather(1, position), drafts.clamp_min(0)], 1)
        positions = position + self.columns[: self.k + 1]
        hidden = self.forward(self.model.model, ids, positions)
        verified = verify_drafts(self.draw(hidden, self.k, self.position), drafts)
        # The next step overwrites what is written after the accepted tokens.
        self.tokens.scatter_(1, positions + 1, verified.tokens.clamp_min(0))
        self._newest[:, 0] = verified.num_accepted + 1
        self._newest[:, 1:] = verified.tokens
        self.position.add_(verified.num_accepted + 1).clamp_(max=self.length - 1)

    def run(self, step: Callable[[], object]) -> Steps:
        """Decode from the prompts until every request is complete.

        Args:
            step: self.step, or a replay of it.
        """
        times, num_tokens = [], []
        synchronize(self.tokens.device)
        begin = time.perf_counter()
        self.start()
        remaining = torch.full((len(self.prompts),), self.length - self.prompts.shape[1])
        while bool((remaining > 0).any()):
            step()
            self._received.copy_(self._newest, non_blocking=True)
            synchronize(self.tokens.device)
            times.append(time.perf_counter() - begin)
            num_tokens.append(self._received[:, 0] * (remaining > 0))
            remaining -= num_tokens[-1]
        return Steps(times, torch.stack(num_tokens))


Drafter = Callable[[Decoding], Tensor]
"""Function that returns drafts int64 [B, k] of a decoding; -1 is no draft."""


def no_drafts(decoding: Decoding) -> Tensor:
    """Propose nothing: decode without drafts in passes of k + 1 tokens."""
    return torch.full_like(decoding.tokens[:, : decoding.k], -1)


def ngram(decoding: Decoding) -> Tensor:
    """Propose the tokens that followed an earlier occurrence of the last tokens.

    The longest match of up to MAX_MATCH tokens counts; among equal ones the latest.
    """
    tokens, position, columns = decoding.tokens, decoding.position[:, None], decoding.columns
    matches = columns < position
    length = torch.zeros_like(tokens)
    for back in range(MAX_MATCH):
        last = tokens.gather(1, (position - back).clamp_min(0))
        matches = matches & (tokens.roll(back, 1) == last) & (columns >= back)
        length += matches
    best = (length * len(columns) + columns).argmax(1, keepdim=True)
    following = best + 1 + columns[: decoding.k]
    valid = (following <= position) & (length.gather(1, best) > 0)
    return tokens.gather(1, following.clamp_max(len(columns) - 1)).where(valid, -1)


class EarlyExit:
    """A drafter made of the model's first layers, norm and head, drawing with the model's noise.

    It writes the cache of these layers where the verifying pass writes next.
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
    """Return a CUDA graph's replay of the work; on a CPU the work itself.

    The work runs once first, which compiles its kernels.
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

"""Speculative decoding of a Hugging Face model, with the tokens of decoding without drafts.

    draft     k + 1 passes of the drafter, each with a draw by the target's noise
    verify    one pass of the model over the last token and k drafts; a draw at each; verify_drafts

The model is a small Llama with random weights, made in memory, and the drafter its own first
layer. Four requests are decoded together, each with its own temperature (one is greedy), seed and
position: requests accept different numbers of drafts, so the cache here writes where each row is.
Everything stays on the device; on a GPU the draft passes and the verify pass are one CUDA graph.

    python examples/speculative_loop.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from fsbench.kernels import flash_sample, step_noise, verify_drafts

PROMPT, LENGTH, K = 8, 40, 3  # tokens of a prompt, of a whole sequence; drafts of a step
TEMPERATURES = [0.0, 0.7, 1.0, 1.3]
SEEDS = [11, 22, 33, 44]


def random_model(device: torch.device) -> LlamaForCausalLM:
    """A head of the size of Qwen3-0.6B's on a GPU, in bf16; a tiny one on a CPU, in fp32."""
    on_gpu = device.type == "cuda"
    D, V = (1024, 151936) if on_gpu else (64, 1000)
    config = LlamaConfig(
        hidden_size=D,
        vocab_size=V,
        intermediate_size=2 * D,
        num_hidden_layers=2,
        num_attention_heads=D // 32,
        num_key_value_heads=D // 32,
        initializer_range=4 * D**-0.5,  # logits with a standard deviation of about 4
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    for parameter in model.model.layers[1].parameters():
        parameter.data *= 0.7  # so that the first layer is a fair guess of both
    return (model.bfloat16() if on_gpu else model).eval()


def first_layer(model: LlamaForCausalLM) -> LlamaModel:
    """The drafter: embedding, first layer and norm are those of the model."""
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})
    with torch.device(model.device):
        drafter = LlamaModel(config)
    drafter.embed_tokens, drafter.norm = model.model.embed_tokens, model.model.norm
    drafter.layers[0] = model.model.layers[0]
    return drafter.to(model.dtype).eval()


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

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        at = self.positions[:, None, :, None].expand_as(keys)
        mine = self.parts[2 * layer : 2 * layer + 2]
        for part, new in zip(mine, (keys, values), strict=True):
            part.scatter_(2, at, new)
        return mine[0], mine[1]

    def get_seq_length(self, *_: Any) -> int:
        return 0  # positions and mask are given, so it decides nothing


class Decoding:
    """B requests: their tokens [B, length + k + 1], and the position [B] of each one's last."""

    def __init__(self, model: LlamaForCausalLM, prompts: Tensor, temperature: Tensor, seed: Tensor):
        self.model, self.drafter = model, first_layer(model)
        self.temperature, self.seed = temperature, seed
        B, device = len(prompts), prompts.device
        room = LENGTH + K + 1
        self.columns = torch.arange(room, device=device)
        self.tokens = torch.zeros(B, room, dtype=torch.int64, device=device)
        self.tokens[:, :PROMPT] = prompts
        self.position = torch.full((B,), PROMPT - 1, device=device)
        self.accepted = torch.zeros(2, dtype=torch.int64, device=device)  # drafts, and of how many
        self.caches = {}
        for part in (self.model.model, self.drafter):
            self.caches[part] = RowCache(part, B, room)
            self.forward(part, prompts[:, :-1], self.columns[: PROMPT - 1].expand(B, -1))

    def forward(self, part: Any, ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B * n, D] of the tokens ids [B, n] at positions [B, n]."""
        cache = self.caches[part]
        cache.positions = positions
        hidden = part(
            input_ids=ids,
            attention_mask=(self.columns <= positions[:, :, None])[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return hidden.flatten(0, 1)

    def draw(self, hidden: Tensor, k: int, position: Tensor) -> Tensor:
        """Tokens [B * (k + 1)] behind rows at position .. position + k, with their own noise."""
        seed, offset = step_noise(self.seed, position, k)
        return flash_sample(
            hidden,
            self.model.lm_head.weight,
            temperature=self.temperature.repeat_interleave(k + 1),
            seed=seed,
            offset=offset,
            noise="token",
        ).tokens

    def plain_step(self) -> None:
        at = self.position[:, None]
        hidden = self.forward(self.model.model, self.tokens.gather(1, at), at)
        self.tokens.scatter_(1, at + 1, self.draw(hidden, 0, self.position)[:, None])
        self.position.add_(1).clamp_(max=LENGTH - 1)

    def speculative_step(self) -> None:
        at = self.position[:, None]
        fed = [self.tokens.gather(1, at)]
        for i in range(K + 1):  # one more than there are drafts: the cache needs the last one, too
            hidden = self.forward(self.drafter, fed[-1], at + i)
            fed.append(self.draw(hidden, 0, self.position + i)[:, None])
        ids = torch.cat(fed[: K + 1], 1)
        positions = at + torch.arange(K + 1, device=at.device)
        hidden = self.forward(self.model.model, ids, positions)
        found = verify_drafts(self.draw(hidden, K, self.position), ids[:, 1:].contiguous())
        # What is written behind the tokens that stand, the next step writes again.
        self.tokens.scatter_(1, positions + 1, found.tokens.clamp_min(0))
        going = self.position < LENGTH - 1
        self.accepted[0] += (found.num_accepted * going).sum()
        self.accepted[1] += K * going.sum()
        self.position.add_(found.num_accepted + 1).clamp_(max=LENGTH - 1)

    def run(self, step: Callable[[], None]) -> float:
        """Seconds until every request has its tokens."""
        begin = time.perf_counter()
        while int(self.position.min()) < LENGTH - 1:
            step()
        return time.perf_counter() - begin


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A replay of the step as a CUDA graph; one step runs before, to compile what it launches."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(device)
    prompts = torch.randint(model.config.vocab_size, (len(SEEDS), PROMPT), device=device)
    temperature = torch.tensor(TEMPERATURES, device=device)
    seed = torch.tensor(SEEDS, device=device)
    found = {}
    for name in ("plain", "speculative"):
        decoding = Decoding(model, prompts, temperature, seed)
        step = getattr(decoding, f"{name}_step")
        seconds = decoding.run(captured(step) if device.type == "cuda" else step)
        found[name] = decoding.tokens[:, :LENGTH]
        print(f"{name}: {seconds:.3f} s")
    accepted, drafts = decoding.accepted.tolist()
    print(f"{accepted} of {drafts} drafts accepted")
    same = (found["plain"] == found["speculative"]).long().cumprod(1).sum(1) - PROMPT
    print(f"equal tokens of {LENGTH - PROMPT}, by request: {same.tolist()}")
    # In bf16 a pass over more rows rounds the hidden states differently, and one other token
    # changes all that follow; in fp32 the difference is too small to be seen.
    if model.dtype == torch.float32 and int(same.min()) < LENGTH - PROMPT:
        raise SystemExit("expected the same tokens with drafts and without")


if __name__ == "__main__":
    main()

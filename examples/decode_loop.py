"""A decode loop over a Hugging Face model, with flash_sample in place of LM head and sampler.

    baseline    logits = model.lm_head(hidden); softmax; torch.multinomial
    fused       flash_sample(hidden, model.lm_head.weight, ...)

The model is a small Llama with random weights, made in memory. Four requests are decoded together,
each with another temperature (one is greedy) and another seed. On a GPU a step, layers and
sampling, is one CUDA graph; on a CPU flash_sample runs its reference in plain torch.

    python examples/decode_loop.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from fsbench.kernels import flash_sample

PROMPT, STEPS = 8, 24  # tokens of a prompt, tokens to decode
WARM_UP = 3  # steps before the graph is captured and the clock started
TEMPERATURES = [0.0, 0.7, 1.0, 1.3]
SEEDS = [11, 22, 33, 44]

Sampler = Callable[[Tensor, Tensor], Tensor]
"""(hidden [B, D], position [1] of the tokens that were fed) -> the tokens behind them [B]."""


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
        initializer_range=2 * D**-0.5,  # logits with a standard deviation of about 2
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if on_gpu:
        model.bfloat16()
    return model.eval()


def baseline(model: LlamaForCausalLM, temperature: Tensor) -> Sampler:
    """Return the usual sampler: logits of all B rows go to memory and are read several times."""
    greedy = temperature == 0
    scale = torch.where(greedy, 1.0, temperature)[:, None]

    def sample(hidden: Tensor, position: Tensor) -> Tensor:
        logits = model.lm_head(hidden).float()  # [B, V]
        drawn = torch.multinomial(torch.softmax(logits / scale, 1), 1)[:, 0]
        return torch.where(greedy, logits.argmax(1), drawn)

    return sample


def fused(model: LlamaForCausalLM, temperature: Tensor, seed: Tensor) -> Sampler:
    """One kernel. The position is the offset, so a step needs no other state than it has anyway."""

    def sample(hidden: Tensor, position: Tensor) -> Tensor:
        weight = model.lm_head.weight
        return flash_sample(
            hidden, weight, temperature=temperature, seed=seed, offset=position
        ).tokens

    return sample


def decode(
    model: LlamaForCausalLM, prompts: Tensor, sample: Sampler
) -> tuple[Tensor, Tensor, float]:
    """Decode STEPS tokens behind every prompt [B, PROMPT].

    Returns:
        Tokens [B, STEPS], the hidden states they were drawn from [B, STEPS, D], tokens/s.
    """
    B, device = prompts.shape[0], prompts.device
    length = PROMPT + STEPS
    # transformers before 4.56 wants batch size, device and type of the cache; later ones find out.
    cache = StaticCache(
        config=model.config,
        max_batch_size=B,
        max_cache_len=length,
        device=device,
        dtype=model.dtype,
    )
    columns = torch.arange(length, device=device)
    sequence = torch.zeros(B, length, dtype=torch.int64, device=device)
    sequence[:, :PROMPT] = prompts
    states = torch.zeros(B, length, model.config.hidden_size, dtype=model.dtype, device=device)
    position = torch.tensor([PROMPT - 1], device=device)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [B, n, D] of the tokens ids [B, n] at positions [n]; no logits."""
        visible = columns <= positions[:, None]  # [n, length]
        return model.model(
            input_ids=ids,
            attention_mask=visible.expand(B, 1, -1, -1),
            position_ids=positions.expand(B, -1),
            past_key_values=cache,
            use_cache=True,
            cache_position=positions,  # read by transformers 4; the caches of 5 count themselves
        ).last_hidden_state

    def step() -> None:
        """Feed the tokens at `position`, draw those behind them. All of it stays on the device."""
        hidden = forward(sequence.index_select(1, position), position)
        states.index_copy_(1, position, hidden)
        tokens = sample(hidden[:, 0], position)
        sequence.index_copy_(1, position + 1, tokens[:, None])
        position.add_(1)

    forward(prompts[:, :-1], columns[: PROMPT - 1])
    for _ in range(WARM_UP):  # compiles the kernels, and makes what a capture needs
        step()
    advance = captured(step) if device.type == "cuda" else step
    begin = time.perf_counter()
    for _ in range(STEPS - WARM_UP):
        advance()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    drawn_from = states[:, PROMPT - 1 : -1]
    return sequence[:, PROMPT:], drawn_from, B * (STEPS - WARM_UP) / seconds


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A replay of the step as a CUDA graph. Nothing is executed while it is captured."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    return graph.replay


def equal_tokens(one: Tensor, other: Tensor) -> int:
    """Return the number of tokens that two sequences share before the first difference."""
    return int((one == other).long().cumprod(0).sum())


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(device)
    prompts = torch.randint(model.config.vocab_size, (len(SEEDS), PROMPT), device=device)
    temperature = torch.tensor(TEMPERATURES, device=device)
    seed = torch.tensor(SEEDS, device=device)

    _, _, rate = decode(model, prompts, baseline(model, temperature))
    print(f"LM head and multinomial: {rate:.0f} tokens/s")
    tokens, hidden, rate = decode(model, prompts, fused(model, temperature, seed))
    print(f"flash_sample:            {rate:.0f} tokens/s")
    if device.type == "cpu":
        print("(On a CPU flash_sample is a reference in float64, for tests: it is not fast.)")

    for row in range(len(SEEDS)):
        one = slice(row, row + 1)
        alone, _, _ = decode(model, prompts[one], fused(model, temperature[one], seed[one]))
        equal = equal_tokens(tokens[row], alone[0])
        print(f"\nrequest {row}, temperature {TEMPERATURES[row]}, seed {SEEDS[row]}:")
        print(*tokens[row].tolist())
        print(f"alone instead of in the batch: the first {equal} of {STEPS} tokens are equal")
        # In bf16 another batch size rounds the hidden states differently, and one other token
        # changes all that follow; in fp32 the difference is too small to be seen.
        if model.dtype == torch.float32 and equal < STEPS:
            raise SystemExit(f"request {row}: expected the same tokens alone; got {alone[0]}")

    greedy = TEMPERATURES.index(0.0)
    best = (hidden[greedy].float() @ model.lm_head.weight.float().T).argmax(1)
    if not torch.equal(best, tokens[greedy]):
        raise SystemExit(f"request {greedy}: expected the argmax {best}; got {tokens[greedy]}")
    print(f"\nrequest {greedy}: every token is the argmax of its logits")


if __name__ == "__main__":
    main()

"""Speculative decoding of a Hugging Face model, with the tokens of decoding without drafts.

The model is a small Llama with random weights, made in memory, and the drafter is its first
layer. Four requests are decoded together, each with another temperature (one is greedy), seed and
position. The loop is fsbench/integrations/decode_loop.py, which `fsbench e2e --speculate` measures;
on a GPU the drafts and the verify pass are one CUDA graph.

    python examples/speculative_loop.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fsbench.integrations.decode_loop import Decoding, EarlyExit, captured

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


@torch.inference_mode()
def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(device)
    prompts = torch.randint(model.config.vocab_size, (len(SEEDS), PROMPT), device=device)
    temperature = torch.tensor(TEMPERATURES, device=device)
    seed = torch.tensor(SEEDS, device=device)
    result = {}
    for k in (0, K):
        drafter = EarlyExit(model, layers=1) if k else None
        decoding = Decoding(model, prompts, temperature, seed, LENGTH, k, drafter)
        decoding.start()
        steps = decoding.run(captured(decoding.step, device))
        result[k] = decoding.tokens[:, :LENGTH]
        print(f"{k} drafts: {steps.times[-1]:.3f} s, {steps.accepted():.2f} accepted per step")
    same = (result[0] == result[K]).long().cumprod(1).sum(1) - PROMPT
    print(f"equal tokens of {LENGTH - PROMPT}, by request: {same.tolist()}")
    # In bf16 a pass over more rows rounds the hidden states differently, and one other token
    # changes all that follow; in fp32 the difference is too small to be seen.
    if model.dtype == torch.float32 and int(same.min()) < LENGTH - PROMPT:
        raise SystemExit("expected the same tokens with drafts and without")


if __name__ == "__main__":
    main()

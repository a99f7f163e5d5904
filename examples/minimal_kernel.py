"""FlashSampling in one short Triton kernel: Algorithm 1 of arXiv 2603.15854.

Read this before kernels/: docs/design/kernels.md says what the real kernels add, step by step. This
one is slow and its noise has 24 bits: a token more than about 16 T below the largest logit is
drawn too rarely.

    python examples/minimal_kernel.py
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import triton
import triton.language as tl


@triton.jit
def sample_tile_kernel(
    hidden,  # [B, D]
    weight,  # [V, D]
    best_score,  # fp32 [B, tiles]
    best_token,  # int64 [B, tiles]
    seed,
    T,
    B,
    D,
    V,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)

    # 1. One tile of logits = hidden @ weight.T. It stays in registers.
    acc = tl.zeros([BLOCK_B, BLOCK_V], tl.float32)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        h_mask = (rows[:, None] < B) & (cols[None, :] < D)
        w_mask = (tokens[:, None] < V) & (cols[None, :] < D)
        h = tl.load(hidden + rows[:, None] * D + cols[None, :], mask=h_mask, other=0.0)
        w = tl.load(weight + tokens[:, None] * D + cols[None, :], mask=w_mask, other=0.0)
        acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")

    # 2. Gumbel noise: argmax(logits + T * gumbel) is a draw from softmax(logits / T).
    uniform = tl.rand(seed, rows[:, None] * V + tokens[None, :])
    gumbel = -tl.log(-tl.log(uniform))
    score = tl.where(tokens[None, :] < V, acc + T * gumbel, float("-inf"))

    # 3. Keep one candidate for each row of the tile: 12 bytes in place of BLOCK_V logits.
    out = rows * tl.num_programs(0) + tile
    tl.store(best_score + out, tl.max(score, axis=1), mask=rows < B)
    tl.store(best_token + out, tile * BLOCK_V + tl.argmax(score, axis=1), mask=rows < B)


def minimal_sample(hidden: Tensor, weight: Tensor, seed: int, temperature: float = 1.0) -> Tensor:
    """Draw one token for each row from softmax(hidden @ weight.T / temperature).

    Args:
        hidden: [B, D], fp16 or fp32 (on a GPU also bf16), contiguous.
        weight: [V, D], like hidden.
        seed: the same seed and shapes give the same tokens.
        temperature: >= 0; 0 is greedy.

    Returns:
        Token ids, int64 [B].
    """
    (B, D), V = hidden.shape, len(weight)
    BLOCK_B, BLOCK_V, BLOCK_D = 16, 64, 32
    grid = (triton.cdiv(V, BLOCK_V), triton.cdiv(B, BLOCK_B))
    score = torch.empty(B, grid[0], device=hidden.device)
    token = torch.empty(B, grid[0], dtype=torch.int64, device=hidden.device)
    sample_tile_kernel[grid](
        *(hidden, weight, score, token, seed, temperature, B, D, V),
        BLOCK_B=BLOCK_B,
        BLOCK_V=BLOCK_V,
        BLOCK_D=BLOCK_D,
    )
    # 4. The best candidate of all tiles is the row's token.
    return token.gather(1, score.argmax(1, keepdim=True))[:, 0]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden = torch.randn(4, 64, device=device)
    weight = torch.randn(200, 64, device=device) / 8
    print("sampled", minimal_sample(hidden, weight, seed=1).tolist())
    greedy = minimal_sample(hidden, weight, seed=1, temperature=0.0)
    print("greedy ", greedy.tolist())
    assert torch.equal(greedy, (hidden @ weight.T).argmax(1))

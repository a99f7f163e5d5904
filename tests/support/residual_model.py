"""A model on disk whose hidden states are the same bits on one GPU and on several.

Its attention and its MLP add nothing: their last weights are zeros. So a hidden state is the norm
of a token's embedding, and no sum is split over ranks. Dummy weights of vLLM depend on the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from fsbench.e2e.models import Decoder

V, D = 20001, 1024
"""vLLM pads V to 20032 rows, 10016 for each of two ranks, which is no multiple of 256: rank 0 draws
from a copy, with rows of rank 1."""
MODEL = Decoder("residual", V, D, 1, 2048, 8, 4, 128, tied=False)
POSITIONS = 128


def write_model(folder: Path) -> None:
    """Write config.json and model.safetensors. Logits have a standard deviation of about 2."""
    (folder / "config.json").write_text(json.dumps(MODEL.config("bfloat16", POSITIONS)))
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})


def weights() -> dict[str, torch.Tensor]:
    """Return the weights by their names in a checkpoint of Qwen3."""
    generator = torch.Generator().manual_seed(7)
    queries, keys = MODEL.heads * MODEL.head_dim, MODEL.kv_heads * MODEL.head_dim

    def normal(rows: int, columns: int, sigma: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * sigma).bfloat16()

    layer = {
        "input_layernorm": torch.ones(D),
        "post_attention_layernorm": torch.ones(D),
        "self_attn.q_norm": torch.ones(MODEL.head_dim),
        "self_attn.k_norm": torch.ones(MODEL.head_dim),
        "self_attn.q_proj": normal(queries, D, 0.02),
        "self_attn.k_proj": normal(keys, D, 0.02),
        "self_attn.v_proj": normal(keys, D, 0.02),
        "self_attn.o_proj": torch.zeros(D, queries),
        "mlp.gate_proj": normal(MODEL.intermediate, D, 0.02),
        "mlp.up_proj": normal(MODEL.intermediate, D, 0.02),
        "mlp.down_proj": torch.zeros(D, MODEL.intermediate),
    }
    named = {
        "model.embed_tokens": normal(V, D, 1.0),
        **{f"model.layers.0.{name}": weight for name, weight in layer.items()},
        "model.norm": torch.ones(D),
        "lm_head": normal(V, D, 2 / D**0.5),
    }
    return {f"{name}.weight": weight.bfloat16() for name, weight in named.items()}

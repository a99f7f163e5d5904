"""Models (models.toml) and kinds of requests (requests.toml) of `fsbench e2e`, by name.

Models are Hugging Face configs: no weights, nothing is downloaded.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fsbench.errors import unknown_name
from fsbench.problem import model

PLAIN = "plain"
"""The kind of requests that nothing is asked for."""


@dataclass(frozen=True)
class Decoder:
    """A dense decoder of Qwen3's architecture; V and D are those of its LM head.

    tied: the LM head is the embedding.
    fp8: the layers' weights are e4m3 with a scale for each 128 x 128, as in Qwen's FP8 models.
    """

    name: str
    V: int
    D: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    fp8: bool = False

    def config(self, dtype: str, positions: int) -> dict[str, Any]:
        """config.json of this model for sequences of up to `positions` tokens.

        dtype: bfloat16, float16 or float32.
        """
        quantized = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": self.V,
            "hidden_size": self.D,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": positions,
            "rope_theta": 1000000,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attention_bias": False,
            "initializer_range": 0.02,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": dtype,
            **({"quantization_config": quantized} if self.fp8 else {}),
        }

    def drafter_config(self, dtype: str, positions: int) -> dict[str, Any]:
        """config.json of an EAGLE drafter for this model: one layer, and a head like its own."""
        found = {**self.config(dtype, positions), "num_hidden_layers": 1}
        found.pop("quantization_config", None)
        return found | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@cache
def decoders() -> dict[str, Decoder]:
    """The models of models.toml by name."""
    text = (resources.files(__package__) / "models.toml").read_text(encoding="utf-8")
    tables, found = tomllib.loads(text), {}
    for name, table in tables.items():
        like = table.pop("like", name)
        entry = {**tables[like], **table}
        if "D" not in entry:
            entry = {"V": model(like).V, "D": model(like).D, **entry}
        found[name] = Decoder(name=name, **entry)
    return found


def decoder(name: str) -> Decoder:
    """The named model; an unknown name raises InvalidArgument with the nearest known one."""
    try:
        return decoders()[name]
    except KeyError:
        raise unknown_name("model", name, decoders()) from None


@cache
def default_samplers() -> dict[str, tuple[str, ...]]:
    """engines.toml: engine -> samplers, the baseline first."""
    text = (resources.files(__package__) / "engines.toml").read_text(encoding="utf-8")
    return {name: tuple(entry["samplers"]) for name, entry in tomllib.loads(text).items()}


@cache
def kinds() -> dict[str, tuple[dict[str, Any], ...]]:
    """Kind -> what its requests ask for, in turn."""
    text = (resources.files(__package__) / "requests.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return {
        name: tuple(entries[each] for each in entry.get("of", [name]))
        for name, entry in entries.items()
    }


def check_kind(name: str) -> str:
    """The name itself; an unknown one raises InvalidArgument with the nearest known one."""
    if name not in kinds():
        raise unknown_name("requests", name, kinds())
    return name


def parameters(kind: str, row: int, seed: int) -> dict[str, Any]:
    """Of SamplingParams, for the request number `row` of a batch."""
    in_turn = kinds()[kind]
    given = dict(in_turn[row % len(in_turn)])
    return given | ({"seed": seed + row} if given.pop("seeded", False) else {})

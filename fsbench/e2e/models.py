"""Names of `fsbench e2e`: models (models.toml), kinds of requests (requests.toml), drafters.

A model is a Hugging Face config without weights. Nothing is downloaded.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from fsbench.errors import InvalidArgument, unknown_name
from fsbench.integrations.routing import FLASH_SAMPLE
from fsbench.problem import model

DRAFTERS = ("ngram", "early-exit")
"""Drafters of `--engine hf --speculate`."""

PLAIN = "plain"
"""The kind of requests with T = 1 and a seed alone."""


@dataclass(frozen=True)
class Decoder:
    """A dense decoder of Qwen3's architecture.

    Attributes:
        V, D: size of the LM head.
        tied: whether the LM head is the embedding.
        fp8: whether the layers' weights are e4m3 with a scale for each 128 x 128 block, as in
            Qwen's FP8 models.
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
        """Return config.json of this model.

        Args:
            dtype: bfloat16, float16 or float32.
            positions: longest sequence in tokens.
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
        """Return config.json of an EAGLE drafter: one layer, and a head of the same size."""
        config = {**self.config(dtype, positions), "num_hidden_layers": 1}
        config.pop("quantization_config", None)
        return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@cache
def decoders() -> dict[str, Decoder]:
    """Return the models of models.toml by name."""
    tables, models = _read_toml("models"), {}
    for name, table in tables.items():
        base = table.pop("like", name)
        entry = {**tables[base], **table}
        if "D" not in entry:
            entry = {"V": model(base).V, "D": model(base).D, **entry}
        models[name] = Decoder(name=name, **entry)
    return models


def decoder(name: str) -> Decoder:
    """Return the named model; raise InvalidArgument for an unknown name."""
    if name not in decoders():
        raise unknown_name("model", name, decoders())
    return decoders()[name]


@cache
def default_samplers() -> dict[str, tuple[str, ...]]:
    """Return engine -> samplers of engines.toml, the baseline first."""
    return {name: tuple(entry["samplers"]) for name, entry in _read_toml("engines").items()}


@cache
def request_kinds() -> dict[str, tuple[dict[str, Any], ...]]:
    """Return kind -> sampling parameters of its requests, which take turns."""
    entries = _read_toml("requests")
    return {
        name: tuple(entries[each] for each in entry.get("of", [name]))
        for name, entry in entries.items()
    }


def sampling_parameters(kind: str, row: int, seed: int) -> dict[str, Any]:
    """Return arguments of vLLM's SamplingParams for request number `row` of a batch."""
    entries = request_kinds()[kind]
    parameters = dict(entries[row % len(entries)])
    return parameters | ({"seed": seed + row} if parameters.pop("seeded", False) else {})


def _read_toml(name: str) -> dict[str, Any]:
    return tomllib.loads((resources.files(__package__) / f"{name}.toml").read_text("utf-8"))


def with_drafts(drafters: Sequence[str], k: int, output_tokens: int) -> tuple[str, ...]:
    """Return DecodePlan.samplers for k drafts: flash_sample without drafts, and each drafter.

    Raises:
        InvalidArgument: an unknown drafter, or more drafts than a request has steps for.
    """
    for name in drafters:
        if name not in DRAFTERS:
            raise unknown_name("--drafter", name, DRAFTERS)
    if k > output_tokens - 2:
        raise InvalidArgument(
            f"--speculate: expected at most {output_tokens - 2}, two less than --output-tokens; "
            f"got {k}"
        )
    return (FLASH_SAMPLE, *(f"{name}-{k}" for name in drafters))


def drafts_label(sampler: str) -> str | None:
    """Return the legend text of a name that with_drafts made; None of another name."""
    name, _, k = sampler.rpartition("-")
    return f"{k} drafts, {name}" if name in DRAFTERS else None

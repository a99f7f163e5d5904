"""The models of `fsbench e2e`, and the size of the models that their configs make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsbench.e2e.models import decoder, default_samplers
from fsbench.errors import InvalidArgument
from fsbench.integrations.draw import sampler_labels


def test_a_model_like_another_differs_in_its_settings():
    plain, fp8, wide = map(decoder, ("qwen3-8b", "qwen3-8b-fp8", "qwen3-8b-248k"))
    assert fp8 == replace(plain, name=fp8.name, fp8=True)
    assert wide == replace(plain, name=wide.name, V=248320)
    config = fp8.config("bfloat16", 256)
    assert config.pop("quantization_config")["quant_method"] == "fp8"
    assert config == plain.config("bfloat16", 256)


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-1.7b", 1.72), ("qwen3-8b", 8.19), ("qwen3-32b", 32.76)]
)
def test_sizes_are_the_published_ones(name, billions):
    """Parameters of the model that transformers builds, without their memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        config = transformers.Qwen3Config(**decoder(name).config("bfloat16", 256))
        model = transformers.Qwen3ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_an_unknown_model_is_named():
    with pytest.raises(InvalidArgument, match=r"qwen3-8.*did you mean 'qwen3-8b'"):
        decoder("qwen3-8")


def test_default_samplers_exist():
    for engine, names in default_samplers().items():
        assert set(names) <= {*sampler_labels(), engine}

"""A real vLLM with a small random model in this process, and requests of every kind for it."""

from __future__ import annotations

import json

import pytest
import torch

from fsbench.e2e.models import Decoder

V, D, REQUESTS, STEPS = 20000, 1024, 64, 3
SMALL = Decoder("small", V, D, 2, 2048, 8, 4, 128, tied=False)


def engine(folder, **more):
    """Start an engine with the plug-in in this process, for the model in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSBENCH_VLLM", "flash_sample")
        patch.setenv("FSBENCH_VLLM_DRAFTS", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        (folder / "config.json").write_text(json.dumps(SMALL.config("bfloat16", 512)))
        save_tokenizer(folder)
        made = LLM(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            max_num_seqs=REQUESTS,
            max_model_len=512,
            gpu_memory_utilization=0.3,
            kv_cache_memory_bytes=1 << 30,
            enable_flashinfer_autotune=False,
            compilation_config={"cudagraph_capture_sizes": [1, 8, 64]},
            **more,
        )
        model = runner_of(made).model
        # Not the seed that tests start with: a hidden state of theirs would be a row of the head.
        # With dummy weights, about 1e-3, every distribution would be flat.
        torch.manual_seed(7)
        model.model.norm.weight.data.fill_(1)
        model.lm_head.weight.data.normal_(0, 2 / D**0.5)
        yield made


DIGITS = "0123456789abcdef"


def save_tokenizer(folder):
    """Save a tokenizer, which a grammar needs: first hexadecimal digits, then arbitrary words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [*DIGITS, "</s>", "<unk>"]
    words += [f"w{token}" for token in range(len(words), V)]
    model = models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)


def runner_of(llm):
    return llm.collective_rpc(lambda worker: worker)[0].model_runner


KINDS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "seed": 0},
    {"temperature": 1.0, "presence_penalty": 0.5, "seed": 0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 0},
    {"temperature": 1.0, "logit_bias": {5: 3.0}, "min_tokens": 2, "seed": 0},
    {"temperature": 1.0, "allowed_token_ids": [3, 5, 8], "seed": 0},
    {"temperature": 1.0, "logprobs": 0, "seed": 0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "logprobs": 5, "seed": 0},
    {"temperature": 0.8, "presence_penalty": 0.5, "logprobs": 2, "seed": 0},
    {"temperature": 1.0, "logprob_token_ids": [3, 5], "seed": 0},
    {"temperature": 1.0, "regex": "[0-9a-f]{40}", "seed": 0},
]
GRAMMAR = len(KINDS) - 1
SERVED = [kind for kind in range(len(KINDS)) if "seed" in KINDS[kind]]
WITH_LOGPROBS = [kind for kind in range(len(KINDS)) if "logprobs" in KINDS[kind]]


def parameters(kind: int, row: int):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = {**KINDS[kind]}
    if "seed" in settings:
        settings["seed"] = row
    if "regex" in settings:
        settings["structured_outputs"] = StructuredOutputsParams(regex=settings.pop("regex"))
    return SamplingParams(max_tokens=4 + row % 9, ignore_eos=True, detokenize=False, **settings)


def prompt(row: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(17 * row + i) % V for i in range(3 + row % 30)]}

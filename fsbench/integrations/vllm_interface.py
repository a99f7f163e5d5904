"""What the plug-in relies on in vLLM; another vLLM is refused, and the error names what differs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from fsbench.errors import EngineMismatch

VERSION = "0.22.1"
SWITCH, MARKS = "FSBENCH_VLLM", "FSBENCH_VLLM_MARKS"
"""Variables of the environment that switch the plug-in on (fsbench.integrations.vllm)."""

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
NUM_SAMPLED = "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected"
OUTPUT = "vllm.v1.worker.gpu.sample.output:SamplerOutput"
TP_GROUP = "vllm.distributed:get_tp_group"

SIGNATURES = {
    f"{RUNNER}.load_model": ("self", "load_dummy_weights", "args", "kwargs"),
    f"{RUNNER}._dummy_sampler_run": ("self", "hidden_states"),
    f"{RUNNER}.sample": ("self", "hidden_states", "input_batch", "grammar_output"),
    f"{RUNNER_V1}.load_model": ("self", "load_dummy_weights"),
    f"{WORKER}.load_model": ("self", "load_dummy_weights"),
    NUM_SAMPLED: (*("num_sampled", "seq_lens", "cu_num_logits", "idx_mapping", "prefill_len"),),
    OUTPUT: (*("sampled_token_ids", "logprobs_tensors", "num_nans", "num_sampled"),),
    TP_GROUP: (),
}
"""What of vLLM is called or replaced -> its parameters."""

ATTRIBUTES = {
    "runner": (
        *("model", "sampler", "req_states.prefill_len.np", "req_states.prefill_len.gpu"),
        *("lora_config", "parallel_config.tensor_parallel_size", "max_num_reqs"),
    ),
    "runner.sampler": (
        *("compute_nans", "sampling_states.vocab_size", "sampling_states.num_logprobs"),
        *(f"sampling_states.{name}.np" for name in ("temperature", "seeds", "top_k", "top_p")),
        *("sampling_states.min_p.np", "penalties_state.use_penalty"),
        *("logit_bias_state.use_logit_bias", "bad_words_state.num_bad_words.np"),
        "logprob_token_ids_state.num_token_ids.np",
    ),
}
"""What is read of a loaded runner and of its sampler."""

BATCH_FIELDS = (
    *("num_reqs", "num_tokens", "num_draft_tokens", "idx_mapping", "idx_mapping_np"),
    *("positions", "logits_indices", "seq_lens", "seq_lens_cpu_upper_bound", "cu_num_logits"),
)
"""What is read of an InputBatch."""

NO_LOGPROBS = -1  # vllm.v1.worker.gpu.sample.states.NO_LOGPROBS


def check_version(version: str | None) -> None:
    """Raise EngineMismatch unless this is the version that the plug-in was written for."""
    if (version or "").split("+")[0] != VERSION:
        raise EngineMismatch(
            f"vllm: expected version {VERSION}, which fsbench.integrations.vllm was written for; "
            f"got {version}. Unset {SWITCH} and {MARKS} to run without it"
        )


def check_signatures() -> None:
    """Raise EngineMismatch, naming what differs, unless vLLM's functions are those expected."""
    for where, expected in SIGNATURES.items():
        parameters = tuple(inspect.signature(find(where)).parameters)
        if parameters != expected:
            raise EngineMismatch(f"{where}: expected parameters {expected}; got {parameters}")
    fields = find("vllm.v1.worker.gpu.input_batch:InputBatch").__dataclass_fields__
    absent = [name for name in BATCH_FIELDS if name not in fields]
    if absent:
        raise EngineMismatch(f"InputBatch: expected fields {', '.join(absent)}")


def check_attributes(root: str, value: object, names: Iterable[str]) -> None:
    """Raise EngineMismatch unless `value` has these dotted attributes."""
    for name in names:
        here = value
        for part in name.split("."):
            if not hasattr(here, part):
                raise EngineMismatch(f"{root}.{name}: expected it in vLLM {VERSION}; no {part}")
            here = getattr(here, part)


def find(where: str) -> Any:
    """The object at module:attribute.attribute."""
    module, _, path = where.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise EngineMismatch(f"{where}: expected it in vLLM {VERSION}; {error}") from error
    return found

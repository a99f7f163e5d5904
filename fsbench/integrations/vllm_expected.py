"""What an adapter relies on in vLLM, and the check that a running vLLM has it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from importlib import import_module
from typing import Any

from fsbench.errors import EngineMismatch

RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"
NUM_SAMPLED = "vllm.v1.worker.gpu.input_batch:get_num_sampled_and_rejected"
SAMPLER = "vllm.v1.worker.gpu.sample.sampler:Sampler"
STATES = "vllm.v1.worker.gpu.sample.states:SamplingStates"
PENALTIES = "vllm.v1.worker.gpu.sample.penalties:PenaltiesState"
BIAS = "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState"
BAD_WORDS = "vllm.v1.worker.gpu.sample.bad_words:BadWordsState"
LOGPROB_IDS = "vllm.v1.worker.gpu.sample.logprob:LogprobTokenIdsState"
REQUESTS = "vllm.v1.worker.gpu.states:RequestState"
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator"
OUTPUT = "vllm.v1.worker.gpu.sample.output:SamplerOutput"
LOGPROBS = "vllm.v1.outputs:LogprobsTensors"
GRAMMAR = "vllm.v1.core.sched.output:GrammarOutput"
TP_GROUP = "vllm.distributed.parallel_state:get_tp_group"
PROCESSOR = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
UNQUANTIZED = "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod"


@dataclass(frozen=True)
class ExpectedApi:
    """What is relied on; each key is module:name or module:class.method.

    signatures: function -> all its parameters. fields: dataclass or NamedTuple -> those used of it,
    by name. filled: those of them that are made, and so need all fields without a default.
    attributes: class -> what its instances must have.
    """

    version: str
    signatures: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, tuple[str, ...]]
    filled: tuple[str, ...] = ()


def differences(
    expected: ExpectedApi,
    parameters: Callable[[str], Sequence[str] | None],
    fields: Callable[[str], Mapping[str, bool] | None],
) -> list[str]:
    """A line for each function or class that is not as expected.

    parameters: of a function. fields: of a class -> whether it has a default. None: there is none.
    """
    lines = []
    for where, names in expected.signatures.items():
        found = parameters(where)
        if found is None:
            lines.append(f"{where}: expected it; there is none")
        elif tuple(found) != names:
            lines.append(f"{where}: expected parameters {names}; got {tuple(found)}")
    for where, names in expected.fields.items():
        known = fields(where)
        if known is None:
            lines.append(f"{where}: expected it; there is none")
            continue
        absent = [name for name in names if name not in known]
        if absent:
            lines.append(f"{where}: expected fields {', '.join(absent)}")
        more = [name for name, default in known.items() if not default and name not in names]
        if more and where in expected.filled:
            lines.append(f"{where}: expected no further fields to fill; got {', '.join(more)}")
    return lines


def check_source(expected: ExpectedApi) -> None:
    """Raise EngineMismatch, naming what differs, unless the vLLM that is imported has all of it."""
    lines = differences(
        expected, lambda where: tuple(inspect.signature(find(where)).parameters), _fields
    )
    if lines:
        raise EngineMismatch(f"vLLM {expected.version}: {'; '.join(lines)}")


def _fields(where: str) -> dict[str, bool]:
    """Fields of a dataclass or NamedTuple -> whether it has a default."""
    cls = find(where)
    if is_dataclass(cls):
        absent = (MISSING, MISSING)
        return {f.name: (f.default, f.default_factory) != absent for f in dataclass_fields(cls)}
    return {name: name in cls._field_defaults for name in cls._fields}


def check_parts(expected: ExpectedApi, parts: Mapping[str, object]) -> None:
    """Raise EngineMismatch unless these objects, by class, have the attributes expected of it."""
    for where, names in expected.attributes.items():
        if where not in parts:
            continue
        absent = [name for name in names if not hasattr(parts[where], name)]
        if absent:
            raise EngineMismatch(
                f"vLLM {expected.version}, {where}: expected attributes {', '.join(absent)}"
            )


def find(where: str) -> Any:
    """The object at module:attribute.attribute. Raises EngineMismatch if there is none."""
    module, _, path = where.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise EngineMismatch(f"{where}: expected it in vLLM; {error}") from error
    return found

"""Of vllm.sampling_params what the worker uses."""

from enum import Enum
from types import SimpleNamespace


class RequestOutputKind(Enum):
    DELTA = 1


class SamplingParams(SimpleNamespace):
    pass

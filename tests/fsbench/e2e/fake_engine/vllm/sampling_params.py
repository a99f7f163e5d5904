"""The parts of vllm.sampling_params that the worker uses."""

from enum import Enum
from types import SimpleNamespace


class RequestOutputKind(Enum):
    DELTA = 1


class SamplingParams(SimpleNamespace):
    pass

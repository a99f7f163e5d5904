"""llama.cpp's sampler chain on the CPU, by its C functions in the package xllamacpp.

    copy; for each row: top-k, top-p, min-p, temperature, dist

The order is llama.cpp's default: filters come before the temperature, so top-p and min-p count
probabilities at T = 1. Each row has a chain, as each request does, with the state of a Mersenne
twister; a draw is one fp64 uniform, looked up in the running sum. Chains continue from step to
step; at another seed or step they are seeded again, from both and the row. A partial sort decides
which of equal logits the filters keep.

llama-cpp-python, the better known binding, has no wheels in the package index. xllamacpp has wheels
with the same library; the last part of its version is llama.cpp's build.

Undefined rows: a NaN logit, or no finite one, leaves the token to comparisons with NaN.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fsbench.baselines.providing.logits import STORED, matmul_logits
from fsbench.problem import FILTERS, Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded

PACKAGE = "xllamacpp"


@cache
def library() -> Any:
    """Load llama.cpp's C functions of sampling, with their types."""
    from ctypes import CDLL, c_bool, c_float, c_int32, c_size_t, c_uint32, c_void_p

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    functions = CDLL(str(path))
    # llama_sampler_chain_params is a struct of one bool, passed like a bool.
    for name, result, *arguments in (
        ("chain_init", c_void_p, c_bool),
        ("chain_add", None, c_void_p, c_void_p),
        ("init_top_k", c_void_p, c_int32),
        ("init_top_p", c_void_p, c_float, c_size_t),
        ("init_min_p", c_void_p, c_float, c_size_t),
        ("init_temp", c_void_p, c_float),
        ("init_dist", c_void_p, c_uint32),
        ("apply", None, c_void_p, c_void_p),
        ("free", None, c_void_p),
    ):
        function = getattr(functions, f"llama_sampler_{name}")
        function.restype, function.argtypes = result, arguments
    return functions


class Chains:
    """A chain for each row.

    Args:
        filters: (top_k, top_p, min_p) of each row; 0, 1 and 0 are off.
    """

    def __init__(self, V: int, temperature: float, filters: Sequence[tuple[int, float, float]]):
        import numpy as np

        self._temperature, self._filters = temperature, filters
        token = [("id", np.int32), ("logit", np.float32), ("p", np.float32)]
        self._ids, self._row = np.arange(V, dtype=np.int32), np.zeros(V, token)  # llama_token_data
        array = [("data", np.uint64), ("size", np.uint64), ("selected", np.int64), ("sorted", "?")]
        self._array = np.zeros(1, np.dtype(array, align=True))  # llama_token_data_array
        self._next: tuple[int, int] | None = None  # the seed and step for which the chains continue
        self._chains: list[int] = []

    def __del__(self) -> None:
        for chain in self._chains:
            library().llama_sampler_free(chain)

    def _seed(self, seed: int, step: int) -> None:
        import numpy as np

        self.__del__()
        self._chains, call = [], library()
        # A chain takes 32 bits.
        seeds = np.random.SeedSequence([seed % 2**64, step % 2**64])
        words = seeds.generate_state(len(self._filters)).tolist()
        for word, (top_k, top_p, min_p) in zip(words, self._filters, strict=True):
            chain = call.llama_sampler_chain_init(True)
            self._chains.append(chain)
            for sampler in (
                call.llama_sampler_init_top_k(top_k),
                call.llama_sampler_init_top_p(top_p, 1),
                call.llama_sampler_init_min_p(min_p, 1),
                call.llama_sampler_init_temp(self._temperature),
                call.llama_sampler_init_dist(word),
            ):
                call.llama_sampler_chain_add(chain, sampler)

    def draw(self, logits: Any, seed: int, step: int) -> list[int]:
        """Draw the tokens of fp32 logits [B, V], a numpy array."""
        if (seed, step) != self._next:
            self._seed(seed, step)
        self._next, tokens = (seed, step + 1), []
        for chain, row in zip(self._chains, logits, strict=True):
            self._row["id"], self._row["logit"] = self._ids, row
            self._array[0] = (self._row.ctypes.data, len(row), -1, False)
            library().llama_sampler_apply(chain, self._array.ctypes.data)
            tokens.append(int(self._row["id"][self._array["selected"][0]]))
        return tokens


def build(problem: Problem, weight: Tensor) -> Launch:
    import torch

    chains = Chains(problem.V, problem.temperature, problem.row_filters())
    weight = padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = matmul_logits(hidden, weight, problem.V).float().cpu().numpy()
        return torch.tensor(chains.draw(logits, int(seed), int(offset)), device=hidden.device)

    return launch


PROVIDER = Provider(
    name="llama_cpp_chain",
    label="llama.cpp",
    kind=Kind.EXACT,
    build=build,
    requires=(PACKAGE,),
    capabilities=replace(
        STORED,
        zero_temperature=True,
        host_sync_free=False,
        graph_safe=False,
        filters=FILTERS,
        mixed_filters=True,
        filter_order=("top_k", "top_p", "min_p", "temperature"),
        ties="any",
    ),
)

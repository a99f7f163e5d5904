"""`flash_sample` as a launch of the harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels._flash_sample import flash_sample
from fsbench.kernels._workspace import held_bytes
from fsbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor


class FlashSampling:
    """See Launch. The kernel is compiled, or loaded from Triton's cache, at the first call."""

    def __init__(
        self,
        problem: Problem,
        weight: Tensor,
        noise: str = "auto",
        temperature: float | None = None,
    ):
        from fsbench.kernels._launch import default_config, tma_possible

        self._weight = weight
        self._temperature = problem.temperature if temperature is None else temperature
        self._noise = noise
        self._tiles = default_config(problem.B, problem.D, weight.device, weight.element_size())
        self.config = f"{self._tiles} {'tma' if tma_possible(weight) else 'pointers'}"

    @property
    def shared_bytes(self) -> int:
        """Memory that outlives a launch and serves all of them: the workspaces."""
        return held_bytes(self._weight.device)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return flash_sample(
            hidden,
            self._weight,
            temperature=self._temperature,
            seed=seed,
            offset=offset,
            noise=self._noise,
            config=self._tiles,
        ).tokens

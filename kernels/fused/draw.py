"""A checked request, carried out: by a kernel, or where none can run by the reference."""

from __future__ import annotations

from fsbench.kernels import fused
from fsbench.kernels.call.request import Request, changes_logits
from fsbench.kernels.call.result import Sample
from fsbench.kernels.configs.choice import choose
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.fused.by_reference import compute
from fsbench.kernels.shard.vocab_shard import reachable


def draw(
    request: Request, kernel: str, config: TileConfig | HopperConfig | None, out: Sample
) -> None:
    """Draw into `out` with a kernel, or on a CPU by the reference (see runs_kernels).

    kernel, config: as `configs.choice.choose` takes them.
    """
    hidden, weight, device = request.hidden, request.weight, request.hidden.device
    choice = choose(hidden, weight, request.noise, kernel, config, changes_logits(request))
    # A CPU's ranks share no memory that a kernel could reach.
    alone = request.merge_later or reachable(request.shard)
    if hidden.is_cuda or (runs_kernels(device, hidden.dtype) and alone):
        fused.launch.launch(request, choice, out)
    else:
        compute(request, out)

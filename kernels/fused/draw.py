"""A checked request, carried out: by a kernel, or where none can run by the reference."""

from __future__ import annotations

from fsbench.kernels import fused
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.fused.by_reference import compute
from fsbench.kernels.shard.vocab_shard import reachable


def draw(request: Request, choice: TileConfig | HopperConfig, out: Sample) -> None:
    """Draw into `out` with the kernel of `choice`, on a CPU by the reference (see runs_kernels)."""
    hidden, device = request.hidden, request.hidden.device
    # A CPU's ranks share no memory that a kernel could reach.
    alone = request.merge_later or reachable(request.shard)
    if device.type == "cuda" or (runs_kernels(device, hidden.dtype) and alone):
        fused.launch.launch(request, choice, out)
    else:
        compute(request, out)

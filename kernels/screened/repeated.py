"""Plain draws that are like an earlier one: past the checks and the choice; see call.plain."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from fsbench.kernels import screened
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Screened
from fsbench.kernels.configs.gpu import runs_kernels
from fsbench.kernels.configs.screen import default_configs
from fsbench.kernels.screened.copied import HeadCopy

_MOST = 4096  # a server sees far fewer

_launches: dict[Hashable, Callable[..., Screened]] = {}


def launch_of(kind: Hashable | None, hidden: Tensor) -> Callable[..., Screened] | None:
    """How calls of this kind are launched (screened.launch.plain); None if there has been none."""
    if kind is None:  # as under torch.compile, which so has no table to trace
        return None
    found = _launches.get(kind)
    if found is None or hidden.is_cuda or runs_kernels(hidden.device, hidden.dtype):
        return found
    return None


def remember(kind: Hashable | None, request: Request, head: HeadCopy) -> None:
    """Keep how a request of this kind, which has been carried out, is launched."""
    hidden = request.hidden
    if kind is not None and runs_kernels(hidden.device, hidden.dtype):
        if len(_launches) >= _MOST:
            _launches.clear()
        B, D = hidden.shape
        configs = default_configs(B, D, hidden.device)
        _launches[kind] = screened.launch.plain(request, head, configs)

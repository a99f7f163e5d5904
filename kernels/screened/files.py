"""The copy of a screened head on disk, as safetensors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    _installed = True
except ModuleNotFoundError:
    _installed = False

from fsbench.errors import InvalidArgument, ProviderUnavailable
from fsbench.kernels.screened.head import ScreenedHead, check_weight

FORMAT = "fsbench screened head 1"


def save_head(head: ScreenedHead, path: str | Path) -> None:
    """Write the copy (not the weight) as safetensors, with the weight's hash.

    Raises:
        ProviderUnavailable: the package safetensors is not installed.
    """
    _require_safetensors()
    parts = dict(zip(head._fields[1:], (part.contiguous() for part in head[1:]), strict=True))
    save_file(parts, path, {"format": FORMAT, "weight_sha256": weight_hash(head.weight)})


def load_head(path: str | Path, weight: Tensor) -> ScreenedHead:
    """Read a copy onto the device of the weight it was made from.

    Raises:
        InvalidArgument: not a file of save_head, or of another weight: another hash of its dtype,
            shape and values. InvalidType: as prepare_head.
        ProviderUnavailable: the package safetensors is not installed.
    """
    _require_safetensors()
    check_weight(weight)
    try:
        with safe_open(path, framework="pt", device=str(weight.device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InvalidArgument(
                    f"path: expected a file with format {FORMAT!r}; got {metadata.get('format')!r}"
                )
            parts = [file.get_tensor(name) for name in ScreenedHead._fields[1:]]
    except SafetensorError as error:
        raise InvalidArgument(f"path: expected a screened head; {path}: {error}") from error
    found = weight_hash(weight)
    if metadata["weight_sha256"] != found:
        raise InvalidArgument(
            f"weight: expected the one that {path} was made from, sha256 "
            f"{metadata['weight_sha256']}; got {found}"
        )
    return ScreenedHead(weight, *parts)


def _require_safetensors() -> None:
    if not _installed:
        raise ProviderUnavailable(
            "heads are saved by the package safetensors, which is not installed; "
            "pip install safetensors"
        )


def weight_hash(weight: Tensor) -> str:
    """SHA-256 of the dtype, the shape and the bytes of a weight, in hexadecimal."""
    digest = hashlib.sha256(f"{weight.dtype} {list(weight.shape)}".encode())
    rows = max(1, (1 << 26) // weight.shape[1])
    for v in range(0, weight.shape[0], rows):
        digest.update(weight[v : v + rows].contiguous().view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()

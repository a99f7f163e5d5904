"""The copy of a screened head on disk, as safetensors."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    _installed = True
except ModuleNotFoundError:
    _installed = False

from fsbench.errors import InvalidArgument, InvalidType, ProviderUnavailable, UnusableFile
from fsbench.kernels.screened.copied import check_copy, check_weight
from fsbench.kernels.screened.head import ScreenedHead

FORMAT = "fsbench screened head 2"
PARTS = ("codes", "scale", "residual", "norm")
"""Names of the tensors, in the order of ScreenedHead.copy."""
_DTYPES = {"I8": torch.int8, "F32": torch.float32}
"""Of safetensors' names those that a copy has."""


def save_head(head: ScreenedHead, path: str | Path) -> None:
    """Write the copy (not the weight) as safetensors, with hashes of the weight and of the copy.

    First every row of the weight, as it is now, is held against its bounds. The file appears when
    it is complete: a failure leaves what was at `path`.

    Raises:
        InvalidArgument: the weight has changed since prepare_head, so that the copy no longer
            bounds it; or the head's parts do not fit each other. InvalidType: no ScreenedHead, or
            a path that is none.
        UnusableFile: the system refuses to write it.
        ProviderUnavailable: the package safetensors is not installed.
    """
    _require_safetensors()
    target = _checked_path(path)
    check_copy(head, as_it_was=False).check()
    parts = dict(zip(PARTS, (part.detach().contiguous() for part in head.copy), strict=True))
    metadata = {
        "format": FORMAT,
        "weight_sha256": weight_hash(head.weight),
        "copy_sha256": _hash(head.copy),
    }
    with _refusals("write", target):
        if target.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        temporary = target.with_name(f".fsbench-{secrets.token_hex(8)}.tmp")
        try:
            temporary.touch()  # the system's own words, should it refuse
            save_file(parts, temporary, metadata)
            os.replace(temporary, target)
        except SafetensorError as error:
            raise UnusableFile(f"cannot write {target}: {error}") from error
        finally:
            _remove(temporary)


def load_head(path: str | Path, weight: Tensor) -> ScreenedHead:
    """Read a copy onto the device of the weight it was made from.

    Raises:
        InvalidArgument: not a whole file of save_head; or of another weight: another hash of its
            dtype, shape and values; or a copy with another hash than when it was saved.
        InvalidType: as prepare_head, or a path that is none.
        UnusableFile: the system refuses to read it.
        ProviderUnavailable: the package safetensors is not installed.
    """
    _require_safetensors()
    check_weight(weight)
    source = _checked_path(path)
    with _refusals("read", source):
        with source.open("rb"):
            pass  # the system's own words, should it refuse
        try:
            wanted, parts = _read(source, weight)
        except SafetensorError as error:
            raise InvalidArgument(f"path: expected a screened head; {source}: {error}") from error
    if wanted != (found := _hash(parts)):
        raise InvalidArgument(
            f"path: expected the copy that was saved, sha256 {wanted}; {source} has {found}"
        )
    return ScreenedHead(weight, *(part.to(weight.device) for part in parts))


def _read(source: Path, weight: Tensor) -> tuple[str, list[Tensor]]:
    """(hash that was saved, parts of the copy on the CPU) of a file of this weight's copy."""
    V, D = weight.shape
    wanted = {"codes": (torch.int8, [V, D])}
    wanted |= dict.fromkeys(PARTS[1:], (torch.float32, [V]))
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise InvalidArgument(
                f"path: expected a file with format {FORMAT!r}; {source} has "
                f"{metadata.get('format')!r}"
            )
        for name in ("weight_sha256", "copy_sha256"):
            if name not in metadata:
                raise InvalidArgument(f"path: expected a {name} in its metadata; {source} has none")
        found = weight_hash(weight)
        if metadata["weight_sha256"] != found:
            raise InvalidArgument(
                f"weight: expected the one that {source} was made from, sha256 "
                f"{metadata['weight_sha256']}; got {found}"
            )
        names = sorted(file.keys())
        if names != sorted(wanted):
            raise InvalidArgument(
                f"path: expected the tensors {', '.join(sorted(wanted))}; {source} has "
                f"{', '.join(names) or 'none'}"
            )
        for name, (dtype, shape) in wanted.items():
            part = file.get_slice(name)
            if _DTYPES.get(part.get_dtype()) != dtype or part.get_shape() != shape:
                raise InvalidArgument(
                    f"path: expected {name} of {str(dtype)[6:]} {shape}; {source} has "
                    f"{part.get_dtype()} {part.get_shape()}"
                )
        # safetensors maps the file: it must not matter what becomes of that.
        return metadata["copy_sha256"], [file.get_tensor(name).clone() for name in wanted]


def _require_safetensors() -> None:
    if not _installed:
        raise ProviderUnavailable(
            "heads are saved by the package safetensors, which is not installed; "
            "pip install safetensors"
        )


def _checked_path(path: object) -> Path:
    if not isinstance(path, str | Path):
        raise InvalidType(f"path: expected a str or a Path; got {type(path).__name__}")
    if "\0" in str(path):
        raise UnusableFile(f"path: expected a file's name; got {str(path)!r}, with a null byte")
    return Path(path)


@contextmanager
def _refusals(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal of what is done inside into one line that names the path."""
    try:
        yield
    except UnusableFile:
        raise
    except OSError as error:
        raise UnusableFile(f"cannot {action} {path}: {error.strerror or error}") from error
    except UnicodeError as error:  # safetensors takes names of UTF-8 only
        raise UnusableFile(f"cannot {action} {str(path)!r}: {error}") from error


def _remove(path: Path) -> None:
    """Remove a file if there is one; a refusal is that of writing it, which was told."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def weight_hash(weight: Tensor) -> str:
    """SHA-256 of the dtype, the shape and the bytes of a weight, in hexadecimal."""
    return _hash([weight])


def _hash(tensors: Sequence[Tensor]) -> str:
    """SHA-256 of dtypes, shapes and bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().view(-1)
        for part in flat.split(1 << 26):
            digest.update(part.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()

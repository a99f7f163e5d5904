"""`save_head` and `load_head`: the int8 copy of a head as a safetensors file."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    _has_safetensors = True
except ModuleNotFoundError:
    _has_safetensors = False

from fsbench.errors import InvalidArgument, InvalidType, ProviderUnavailable, UnusableFile
from fsbench.kernels.screened.head import ScreenedHead
from fsbench.kernels.screened.int8_copy import check_copy, check_weight

FORMAT = "fsbench screened head 2"
PARTS = ("codes", "scale", "residual", "norm")
"""Names of the tensors in the file, in the order of ScreenedHead.copy."""
_DTYPES = {"I8": torch.int8, "F32": torch.float32}
"""Torch dtypes by their safetensors names."""


def save_head(head: ScreenedHead, path: str | Path) -> None:
    """Write the copy (not the weight) as safetensors, with hashes of the weight and the copy.

    Every row of the current weight is checked against its bounds first. The file is replaced
    atomically: if writing fails, the previous file stays. A new file gets the permissions of the
    umask, an existing file keeps its permissions. A link to a file stays a link.

    Args:
        head: from prepare_head or load_head.
        path: file to write; a new name or a regular file.

    Raises:
        InvalidType: `head` is not a ScreenedHead, or `path` is not a str or Path.
        InvalidArgument: the weight has changed since prepare_head and the copy no longer bounds it,
            or the parts of the head do not fit each other.
        UnusableFile: `path` is not a regular file (a device, a pipe, a folder), or the system
            refuses to write it.
        ProviderUnavailable: the package safetensors is not installed.
    """
    path = _checked_path(path)
    check_copy(head, as_it_was=False).check()
    parts = dict(zip(PARTS, (part.detach().contiguous() for part in head.copy), strict=True))
    metadata = {
        "format": FORMAT,
        "weight_sha256": _hash([head.weight]),
        "copy_sha256": _hash(head.copy),
    }
    with _named_errors("write", path):
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise UnusableFile(f"cannot write {path}: expected a regular file or a new name")
        temporary = target.with_name(f".fsbench-{secrets.token_hex(8)}.tmp")
        try:
            temporary.touch()  # raises the system's error if the folder refuses new files
            mode = (target if target.exists() else temporary).stat().st_mode
            save_file(parts, temporary, metadata)
            temporary.chmod(stat.S_IMODE(mode))  # safetensors creates files with mode 0600
            os.replace(temporary, target)
        except SafetensorError as error:
            raise UnusableFile(f"cannot write {path}: {error}") from error
        finally:
            with suppress(OSError):  # writing has raised its error
                temporary.unlink(missing_ok=True)


def load_head(path: str | Path, weight: Tensor) -> ScreenedHead:
    """Read the copy of a head onto the device of its weight.

    Args:
        path: file written by save_head.
        weight: [V, D], with the dtype, shape and values that the copy was made from.

    Raises:
        InvalidType: as prepare_head, or `path` is not a str or Path.
        InvalidArgument: not a complete file of save_head, or one of another weight, or a copy whose
            hash has changed since it was saved.
        UnusableFile: the system refuses to read the file.
        ProviderUnavailable: the package safetensors is not installed.
    """
    check_weight(weight)
    path = _checked_path(path)
    with _named_errors("read", path):
        with path.open("rb"):
            pass  # raises the system's error if the file cannot be read
        try:
            saved_hash, parts = _read(path, weight)
        except SafetensorError as error:
            raise InvalidArgument(f"path: expected a screened head; {path}: {error}") from error
    if saved_hash != (copy_hash := _hash(parts)):
        raise InvalidArgument(
            f"path: expected the copy that was saved, sha256 {saved_hash}; {path} has {copy_hash}"
        )
    return ScreenedHead(weight, *(part.to(weight.device) for part in parts))


def _read(path: Path, weight: Tensor) -> tuple[str, list[Tensor]]:
    """Return the saved hash of the copy and its parts, on the CPU."""
    V, D = weight.shape
    shapes = {"codes": (torch.int8, [V, D])}
    shapes |= dict.fromkeys(PARTS[1:], (torch.float32, [V]))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise InvalidArgument(
                f"path: expected a file with format {FORMAT!r}; {path} has "
                f"{metadata.get('format')!r}"
            )
        for name in ("weight_sha256", "copy_sha256"):
            if name not in metadata:
                raise InvalidArgument(f"path: expected a {name} in its metadata; {path} has none")
        digest = _hash([weight])
        if metadata["weight_sha256"] != digest:
            raise InvalidArgument(
                f"weight: expected the one that {path} was made from, sha256 "
                f"{metadata['weight_sha256']}; got {digest}"
            )
        names = sorted(file.keys())
        if names != sorted(shapes):
            raise InvalidArgument(
                f"path: expected the tensors {', '.join(sorted(shapes))}; {path} has "
                f"{', '.join(names) or 'none'}"
            )
        for name, (dtype, shape) in shapes.items():
            part = file.get_slice(name)
            if _DTYPES.get(part.get_dtype()) != dtype or part.get_shape() != shape:
                raise InvalidArgument(
                    f"path: expected {name} of {str(dtype)[6:]} {shape}; {path} has "
                    f"{part.get_dtype()} {part.get_shape()}"
                )
        # safetensors maps the file into memory; clones do not change if the file does.
        return metadata["copy_sha256"], [file.get_tensor(name).clone() for name in shapes]


def _checked_path(path: object) -> Path:
    if not _has_safetensors:
        raise ProviderUnavailable(
            "screened heads are saved by the package safetensors, which is not installed; "
            "run pip install safetensors"
        )
    if not isinstance(path, str | Path):
        raise InvalidType(f"path: expected a str or a Path; got {type(path).__name__}")
    if "\0" in str(path):
        raise UnusableFile(f"path: expected a file name; got {str(path)!r} with a null byte")
    return Path(path)


@contextmanager
def _named_errors(action: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into one UnusableFile that names the path."""
    try:
        yield
    except UnusableFile:
        raise
    except OSError as error:
        raise UnusableFile(f"cannot {action} {path}: {error.strerror or error}") from error
    except UnicodeError as error:  # safetensors takes only UTF-8 names
        raise UnusableFile(f"cannot {action} {str(path)!r}: {error}") from error


def _hash(tensors: Sequence[Tensor]) -> str:
    """Return the SHA-256 of the tensors' dtypes, shapes and bytes, in hexadecimal."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        flat = tensor.detach().contiguous().view(-1)
        for part in flat.split(1 << 26):
            digest.update(part.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()

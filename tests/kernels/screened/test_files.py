"""Saving and loading the int8 copy of a head: what is written is loaded, all else is refused."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fsbench.errors import InvalidArgument, InvalidType, UnusableFile
from fsbench.kernels.screened.head import prepare_head
from fsbench.kernels.screened.head_file import PARTS, load_head, save_head

pytestmark = pytest.mark.usefixtures("one_thread")


def weight_of(V: int = 70, D: int = 48, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(V, D, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "head.safetensors"


def saved(path) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, str]]:
    """Save the head of a weight at path; return the weight, the file's tensors and metadata."""
    weight = weight_of()
    save_head(prepare_head(weight), path)
    # Clones: the tensors of safetensors are views of the file, which tests write again.
    tensors = {name: part.clone() for name, part in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        return weight, tensors, file.metadata()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_saved_head_is_loaded_bit_by_bit(path, dtype):
    weight = torch.nn.Parameter(weight_of(dtype=dtype))
    with torch.no_grad():
        weight[3, 0], weight[4], weight[5, 1] = torch.nan, 0.0, torch.inf
    head = prepare_head(weight)
    save_head(head, path)
    loaded = load_head(str(path), weight)
    assert loaded.weight is weight
    for part, other in zip(head.copy, loaded.copy, strict=True):
        assert part.dtype == other.dtype
        assert torch.equal(part, other)
    assert os.listdir(path.parent) == [path.name]


def test_a_head_of_another_weight_is_refused(path):
    weight, _, _ = saved(path)
    changed = weight.clone()
    changed[69, 47] += 1
    for other in (changed, weight[:, :24].contiguous(), weight.half(), weight.view(35, 96)):
        with pytest.raises(
            InvalidArgument, match=r"weight: expected the one that .* was made from"
        ):
            load_head(path, other)


@pytest.mark.parametrize("value", [-0.5, torch.nan, 2.0**60])
def test_a_weight_that_changed_after_preparing_is_not_saved(path, value):
    weight = weight_of()
    head = prepare_head(weight)
    weight[69, 47] = value
    with pytest.raises(InvalidArgument, match=r"head: expected a copy .* row 69"):
        save_head(head, path)
    assert not os.listdir(path.parent)


@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_of_the_copy_is_refused(path, part):
    weight, tensors, metadata = saved(path)
    for bit in (0, 7, 8 * tensors[part].nbytes - 2):
        changed = tensors[part].clone()
        changed.view(torch.uint8).flatten()[bit // 8] ^= 1 << bit % 8
        save_file({**tensors, part: changed}, path, metadata)
        with pytest.raises(InvalidArgument, match=r"path: expected the copy .* sha256"):
            load_head(path, weight)


def without(named: dict, name: str) -> dict:
    return {key: value for key, value in named.items() if key != name}


def test_other_files_are_refused(path):
    weight, tensors, metadata = saved(path)
    whole = path.read_bytes()
    for content in (b"", b"not a head", whole[:100], whole[:-1]):
        path.write_bytes(content)
        with pytest.raises(InvalidArgument, match="path: expected a screened head"):
            load_head(path, weight)
    for parts, facts, wrong in (
        (tensors, None, "a file with format"),
        (tensors, metadata | {"format": "fsbench screened head 1"}, "a file with format"),
        (tensors, without(metadata, "weight_sha256"), "a weight_sha256"),
        (tensors, without(metadata, "copy_sha256"), "a copy_sha256"),
        (without(tensors, "norm"), metadata, "the tensors codes, norm, residual, scale;"),
        (tensors | {"codes": tensors["codes"].float()}, metadata, "codes of int8"),
        (tensors | {"scale": tensors["scale"][:5]}, metadata, r"scale of float32 \[70\]"),
        (tensors | {"codes": tensors["codes"].view(35, 96)}, metadata, r"codes of int8 \[70, 48\]"),
        (tensors | {"norm": tensors["norm"].double()}, metadata, "norm of float32"),
    ):
        save_file(parts, path, facts)
        with pytest.raises(InvalidArgument, match=f"path: expected {wrong}"):
            load_head(path, weight)


def test_what_cannot_be_read_names_the_path(path, tmp_path):
    weight = weight_of()
    with pytest.raises(UnusableFile, match=rf"cannot read {path}: No such file"):
        load_head(path, weight)
    with pytest.raises(UnusableFile, match=r"cannot read .*: Is a directory"):
        load_head(tmp_path, weight)
    for load in (lambda: load_head(5, weight), lambda: save_head(prepare_head(weight), None)):
        with pytest.raises(InvalidType, match=r"expected a str or a Path; got (int|NoneType)"):
            load()
    for load in (lambda: load_head("a\0", weight), lambda: save_head(prepare_head(weight), "a\0")):
        with pytest.raises(UnusableFile, match="null"):
            load()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/null")])
def test_only_a_regular_file_is_replaced(path, make):
    make(path)
    before = os.lstat(path)
    with pytest.raises(UnusableFile, match=rf"cannot write {path}: expected a regular file"):
        save_head(prepare_head(weight_of()), path)
    assert os.lstat(path) == before and os.listdir(path.parent) == [path.name]


def test_a_link_to_a_file_stays_a_link(path, tmp_path):
    head = prepare_head(weight_of())
    link = tmp_path / "link"
    link.symlink_to(path.name)
    for _ in range(2):  # first a link to nothing
        save_head(head, link)
        assert link.is_symlink() and path.is_file() and not path.is_symlink()
        load_head(link, head.weight)


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_a_new_file_has_the_mode_of_the_umask_and_an_old_one_keeps_its_own(path, umask):
    head = prepare_head(weight_of())
    old = os.umask(umask)
    try:
        save_head(head, path)
        assert path.stat().st_mode & 0o777 == 0o666 & ~umask
        path.chmod(0o640)
        save_head(head, path)
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(old)


def test_what_cannot_be_written_leaves_nothing_behind(path, tmp_path, monkeypatch):
    head = prepare_head(weight_of())
    with pytest.raises(UnusableFile, match=r"cannot write .*: No such file"):
        save_head(head, tmp_path / "nowhere" / "head")
    (tmp_path / "text").write_text("a file")
    with pytest.raises(UnusableFile, match=r"cannot write .*: Not a directory"):
        save_head(head, tmp_path / "text" / "head")
    (tmp_path / "text").unlink()
    save_head(head, path)
    before = path.read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_head(head, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_a_full_disk_leaves_nothing_behind(path):
    """A limit on the size of files acts like a full disk."""
    head = prepare_head(weight_of())
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # Python ignores the limit's signal
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UnusableFile, match=rf"cannot write {path}: .*[Ff]ile too large"):
            save_head(head, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(path.parent)


def test_what_is_no_head_is_not_saved(path):
    with pytest.raises(InvalidType, match="head: expected a ScreenedHead; got Tensor"):
        save_head(weight_of(), path)
    assert not os.listdir(path.parent)

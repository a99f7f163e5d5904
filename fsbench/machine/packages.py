"""Versions of installed packages, without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata


def package_version(package: str) -> str | None:
    """The installed version of a distribution, None if it is absent. Imports nothing of it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
"""Distributions that are not named like the package that is imported."""


def versions(packages: Iterable[str]) -> str:
    """'vllm 0.26.0, flashinfer-python 0.6.14': the distributions of top-level packages."""
    names = [_DISTRIBUTIONS.get(name, name) for name in packages]
    return ", ".join(f"{name} {package_version(name) or '(no version)'}" for name in names)

"""Versions of installed packages, without importing them."""

from __future__ import annotations

from importlib import metadata


def package_version(package: str) -> str | None:
    """The installed version of a distribution, None if it is absent. Imports nothing of it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

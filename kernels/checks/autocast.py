"""Public calls compute in their own dtypes, whatever torch.autocast would choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function with torch.autocast switched off inside it, for CPU and GPU tensors."""

    @wraps(function)
    def exact(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*arguments, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return exact

"""Parse option values: lists, ranges, filters, penalties and shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from fsbench.errors import InvalidArgument, shown
from fsbench.problem import PENALTIES, model

MOST = 2**31 - 1
"""Largest size that an option accepts."""


def int_list(text: str, name: str, minimum: int = 1, most: int = MOST) -> list[int]:
    """Parse '1,2,4' -> [1, 2, 4] without repetitions. name: the option, for error messages."""
    parts = [part.strip() for part in text.split(",")]
    fine = all(re.fullmatch(r"\d{1,20}", part, re.ASCII) for part in parts)
    values = [int(part) for part in parts] if fine else []
    if not fine or min(values) < minimum or max(values) > most:
        raise InvalidArgument(
            f"{name}: expected integers from {minimum} to {most} separated by commas, "
            f"such as 1,2,4; got {shown(text)}"
        )
    return list(dict.fromkeys(values))


def number_list(text: str, name: str) -> list[float]:
    """Parse '0.9,1' -> [0.9, 1.0] without repetitions. name: the option, for error messages."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise InvalidArgument(
            f"{name}: expected numbers separated by commas, such as 0.5,1; got {shown(text)}"
        )
    return list(dict.fromkeys(values))


def filters(
    top_k: str | None, top_p: str | None, min_p: str | None, mixed: bool
) -> list[dict[str, Any]]:
    """Return arguments of Problem for each combination of the comma lists; [] without filters.

    A combination with all filters off is not mixed.
    """
    if top_k is None and top_p is None and min_p is None:
        if mixed:
            raise InvalidArgument("--mixed: expected with --top-k, --top-p or --min-p; got none")
        return []
    ks = [0] if top_k is None else int_list(top_k, "--top-k", minimum=0)
    ps = [1.0] if top_p is None else number_list(top_p, "--top-p")
    min_ps = [0.0] if min_p is None else number_list(min_p, "--min-p")
    return [
        {"top_k": k, "top_p": p, "min_p": m, "mixed": mixed and (k, p, m) != (0, 1.0, 0.0)}
        for k in ks
        for p in ps
        for m in min_ps
    ]


def penalties_of(
    repetition: float, presence: float, frequency: float, history: int | None
) -> dict[str, Any]:
    """Return penalties as arguments of Problem; {} if all are off."""
    values = dict(zip(PENALTIES, (repetition, presence, frequency), strict=True))
    if values == PENALTIES:
        if history is not None:
            raise InvalidArgument("--history: expected with a penalty; got none")
        return {}
    return {**values, "history": 1024 if history is None else history}


def batch_range(text: str, name: str) -> range | list[int]:
    """Parse '1:256' -> range(1, 257) or '1,2,4' -> [1, 2, 4]. name: the option."""
    first, colon, last = text.partition(":")
    if not colon:
        return int_list(text, name)
    ends = [int(end) for end in (first, last) if re.fullmatch(r"\d{1,20}", end, re.ASCII)]
    if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= MOST:
        raise InvalidArgument(
            f"{name}: expected a range from 1 to {MOST}, such as 1:256; got {shown(text)}"
        )
    return range(ends[0], ends[1] + 1)


def shapes(models: Iterable[str], d: str | None, v: str | None) -> list[tuple[str, int, int]]:
    """Return the requested LM heads as (label, D, V), each shape once.

    Args:
        models: values of --model, each a name or several names separated by commas.
        d: the text of --d, a comma list of hidden sizes, or None.
        v: the text of --v, a comma list of vocabulary sizes, or None.

    Returns:
        One shape per model, then the cross product of --d and --v. Models with the same shape
        share an entry ('qwen3-8b, qwen3-235b-a22b'). [] without options.
    """
    if (d is None) != (v is None):
        present, missing = ("--d", "--v") if v is None else ("--v", "--d")
        raise InvalidArgument(f"{missing}: expected together with {present}; got only {present}")
    labels: dict[tuple[int, int], list[str]] = {}
    for name in (name.strip() for text in models for name in text.split(",")):
        head = model(name)
        names = labels.setdefault((head.D, head.V), [])
        if name not in names:
            names.append(name)
    if d is not None and v is not None:
        vocabularies = int_list(v, "--v")
        for D in int_list(d, "--d"):
            for V in vocabularies:
                labels.setdefault((D, V), [])
    return [(", ".join(names) or f"d{D}_v{V}", D, V) for (D, V), names in labels.items()]

"""Cases for `fsbench run`: truncated_sample with fields in addition to its tokens.

    fsbench run --provider-path tools/cases/filtered_fields.py --provider topk_topp_logprob \
        --provider flash_sampling_topk_topp --top-p 0.9 --out OUT

Tokens are those of flash_sampling_topk_topp, whose time is that of a call without the field.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from fsbench.kernels.flash_sampling_topk_topp import PROVIDER as TOKENS
from fsbench.kernels.providing.truncated import TruncatedLaunch

FIELDS: dict[str, dict[str, Any]] = {
    "logprob": {"return_logprob": True},
    "rank": {"return_rank": True},
    "top_20": {"return_top": 20},
    "kept": {"return_kept": True},
    "kept_logprob": {"return_kept_logprob": True},
    "support": {"return_support": 1024},
}

PROVIDERS = tuple(
    replace(
        TOKENS,
        name=f"topk_topp_{name}",
        label=f"{TOKENS.label}, {name}",
        build=partial(TruncatedLaunch, **fields),
        call="",
        presets=(),
    )
    for name, fields in FIELDS.items()
)

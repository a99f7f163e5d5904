"""Greedy decoding from a screened head: the argmax of the logits at about half of the bytes.

flash_sampling_screened without noise. Logits are fp32 and never rounded, so among tokens whose
logits are equal in bf16 it takes the larger; equal ones go to the lowest token.
"""

from __future__ import annotations

from functools import partial

from fsbench.kernels.providing.screened import ScreenedLaunch, kept_bytes, unsupported_reason
from fsbench.provider import Capabilities, Kind, Provider

PROVIDER = Provider(
    name="greedy_screened",
    label="Greedy, screened head",
    kind=Kind.GREEDY,
    requires=("triton",),
    capabilities=Capabilities(
        zero_temperature=True, fused=True, host_sync_free=True, batch_invariant=True
    ),
    build=partial(ScreenedLaunch, temperature=0.0),  # whatever the problem's is
    kept_bytes=kept_bytes,
    supports=unsupported_reason,
)

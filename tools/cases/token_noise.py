"""Cases for `fsbench run`: both kernels with a Gumbel for each token.

    fsbench run --provider-path tools/cases/token_noise.py --provider token_portable \
        --provider token_hopper --provider matmul_only --d 4096 --v 151936 --batch 64,144 --out OUT

Speculation and screened heads draw with this noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.flash_sampling_token import PROVIDER as TOKEN
from fsbench.kernels.providing.launches import FlashSampling, variant
from fsbench.provider import Launch, Provider

CASES: dict[str, tuple[Callable[..., Launch], Provider]] = {
    "portable": (partial(FlashSampling, noise="token", kernel="portable"), TOKEN),
    "hopper": (partial(FlashSampling, noise="token", kernel="hopper"), HOPPER),
}
PROVIDERS = tuple(
    variant(TOKEN, f"token_{name}", f"{name}, token noise", build, like.supports)
    for name, (build, like) in CASES.items()
)

"""`screened_sample`: the tokens of flash_sample from an int8 screen of the head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.values import check_flag, check_screen_configs, check_screened_noise
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.fused.api import flash_sample
from fsbench.kernels.launch.heads import drawn_from
from fsbench.kernels.launch.request import checked_request
from fsbench.kernels.launch.result import Screened, empty_screened
from fsbench.kernels.screened.draw import carry_out
from fsbench.kernels.screened.head import ScreenedHead
from fsbench.kernels.screened.int8_copy import check_copy
from fsbench.kernels.shard.vocab_shard import SHARD_UNIT, VocabShard


def screened_sample(
    hidden: Tensor,
    head: ScreenedHead,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    seed: Tensor | int,
    offset: Tensor | int | None = None,
    num_samples: int = 1,
    soft_cap: float | None = None,
    vocab_size: int | None = None,
    return_logprob: bool = False,
    return_logz: bool = False,
    noise: str = "auto",
    shard: VocabShard | None = None,
    configs: tuple[ScreenConfig | HopperScreenConfig, ResolveConfig] | None = None,
) -> Screened:
    """Return the tokens of flash_sample(hidden, head.weight, noise="token") at half the bytes read.

    Arguments are those of flash_sample, with `head` from prepare_head or load_head in place of the
    weight. On a GPU the tokens are equal, not only their distribution
    (docs/guide/screened-head.md).

    Args:
        num_samples: above 1, the call runs flash_sample. It returns the same tokens, four samples
            per pass over the weight, which takes less time than a pass over the copy for each.
        return_logprob, return_logz: log Z needs every logit, and the screen only bounds them. A
            call that returns either runs flash_sample: the same tokens and exact values, at the
            cost of the full kernel.
        noise: "token", or "auto", which is the same here.
        shard: the shard whose weight the head was prepared from. All ranks call together with the
            same arguments, each with its shard and head, and get the tokens that one GPU with the
            whole vocabulary gets (docs/guide/screened-head.md).
        configs: tile shapes of the two launches; by default those in use for B and this GPU.

    Returns:
        Screened: the fields of Sample, and how many tokens of each row were computed exactly, on
        this rank. That number depends on when programs and ranks learn of each other's bounds.

    The call takes two launches. The host does not wait for them, and nothing is cleared between
    calls. Like flash_sample, it uses one workspace per stream. It can be captured in a CUDA graph
    after one launch outside, and compiled (torch.ops.fsbench.screened_sample). Replays of a graph
    do not check whether the weight has changed. On CPU tensors it runs in torch, or under
    TRITON_INTERPRET=1 the kernels (but not in bf16).

    Raises:
        InvalidType, InvalidArgument: as flash_sample, or `head` is not a ScreenedHead whose parts
            fit each other and hidden, or it is not of the shard's rows.
        CaptureError: as flash_sample.
    """
    check_copy(head)
    rows = head.weight if shard is None else drawn_from(head, shard)
    configs = check_screen_configs(configs)
    if shard is not None and any(SHARD_UNIT % config.block_v for config in configs or ()):
        raise InvalidArgument(
            f"configs: expected block_v that divides {SHARD_UNIT} with a VocabShard; got "
            + " and ".join(str(config.block_v) for config in configs or ())
        )
    check_flag("return_logprob", return_logprob)
    check_flag("return_logz", return_logz)
    arguments: dict[str, Any] = {
        "temperature": temperature,
        "bias": bias,
        "mask": mask,
        "seed": seed,
        "offset": offset,
        "num_samples": num_samples,
        "soft_cap": soft_cap,
        "vocab_size": vocab_size,
        "noise": check_screened_noise(noise),
    }
    one = isinstance(num_samples, int) and num_samples == 1
    if not one or return_logprob or return_logz:
        arguments |= {"return_logprob": return_logprob, "return_logz": return_logz}
        drawn = flash_sample(hidden, rows, **arguments)
        return Screened(drawn.tokens, drawn.valid, drawn.logprob, drawn.logz)
    request = checked_request(hidden, rows, **arguments, may_be_sharded=True)
    out = empty_screened(len(hidden), hidden.device)
    if not len(hidden):
        return out
    carry_out(request, head, configs, out)
    return out

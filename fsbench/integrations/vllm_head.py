"""Find the LM head of a model that vLLM has loaded, and check that logits are its matmul alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsbench.integrations.compile_ahead import shard_of
from fsbench.integrations.draw import Head
from fsbench.integrations.vllm_0_26 import TP_GROUP, draft_steps
from fsbench.integrations.vllm_expected import find

_UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
_NO_HEAD = "model: no lm_head.weight and logits_processor"


class LoadedHead(NamedTuple):
    """An engine's LM head.

    Attributes:
        head: what to draw from.
        weight: the engine's weight.
        copied_bytes: bytes of `head` that are not in `weight`.
    """

    head: Head
    weight: Tensor
    copied_bytes: int

    def may_have_moved(self, runner: Any) -> bool:
        """Return whether the weight may be another tensor now; the same on all ranks."""
        owner = head_owner(runner.model)
        # Whether a shard is a copy differs between ranks, and they have to search together.
        if owner is None or self.copied_bytes or runner.parallel_config.tensor_parallel_size > 1:
            return True
        return bool(owner.lm_head.weight.data_ptr() != self.weight.data_ptr())


def head_owner(model: Any) -> Any | None:
    """Return the module with lm_head.weight and logits_processor: the model or the one inside."""
    inner = getattr(model, "get_language_model", None)
    for owner in (model, inner() if callable(inner) else None):
        head = getattr(owner, "lm_head", None)
        if getattr(head, "weight", None) is not None and hasattr(owner, "logits_processor"):
            return owner
    return None


def find_head(runner: Any) -> LoadedHead | str:
    """Return the LM head of a loaded model, or why the plug-in leaves the model to vLLM.

    A collective call: all ranks of a model get the same answer.
    """
    ranks = runner.parallel_config.tensor_parallel_size
    group = find(TP_GROUP)() if ranks > 1 else None
    reason = unsupported_head(runner)
    if group is not None:
        reason = first_reason(reason, group.cpu_group)
    if reason is not None:
        return reason
    owner: Any = head_owner(runner.model)
    weight = owner.lm_head.weight.detach()
    V, soft_cap = owner.logits_processor.org_vocab_size, owner.logits_processor.soft_cap
    if group is None:
        return LoadedHead(Head(weight, V, soft_cap), weight, 0)
    max_rows = runner.max_num_reqs * (1 + draft_steps(runner))
    shard = shard_of(weight, group.device_group, V, max_rows)
    shared = weight.untyped_storage().data_ptr() == shard.weight.untyped_storage().data_ptr()
    return LoadedHead(Head(shard, V, soft_cap), weight, 0 if shared else shard.weight.nbytes)


def find_draft_head(runner: Any) -> tuple[LoadedHead, Tensor | None] | str:
    """Return (the drafter's LM head, d2t), or why vLLM draws the drafts.

    d2t: int64, for each row of the head its token of the target minus the row's index; or None.
    """
    if runner.parallel_config.tensor_parallel_size > 1:
        return "engine: several GPUs"
    model = runner.speculator.model
    owner, d2t = head_owner(model), getattr(model, "draft_id_to_target_id", None)
    if owner is None:
        return _NO_HEAD
    if owner.lm_head.weight.dtype != runner.speculator.dtype:
        return f"model: draft head in {owner.lm_head.weight.dtype}"
    compute_logits = model.compute_logits
    if d2t is not None:  # compute_logits then returns logits of the target's tokens
        d2t = d2t.detach()
        tokens = d2t + torch.arange(len(d2t), device=d2t.device)
        model = SimpleNamespace(
            lm_head=owner.lm_head,
            logits_processor=owner.logits_processor,
            compute_logits=lambda hidden: compute_logits(hidden)[:, tokens],
        )
    head = find_head(
        SimpleNamespace(
            model=model, parallel_config=runner.parallel_config, lora_config=runner.lora_config
        )
    )
    return head if isinstance(head, str) else (head, d2t)


def first_reason(reason: str | None, group: Any) -> str | None:
    """Return the first reason of any rank of the group, so that all ranks do the same."""
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group)
    return next((each for each in reasons if each is not None), None)


def unsupported_head(runner: Any) -> str | None:
    """Return why this rank's logits are not those of an LM head that the kernels take, or None."""
    if runner.lora_config is not None:
        return "model: LoRA"
    owner = head_owner(runner.model)
    if owner is None:
        return _NO_HEAD
    head, processor = owner.lm_head, owner.logits_processor
    weight = head.weight
    if type(head.quant_method).__name__ not in _UNQUANTIZED:
        return "model: quantized LM head"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"model: LM head in {weight.dtype}"
    if processor.head_dtype not in (None, weight.dtype):
        return f"model: logits in {processor.head_dtype}"
    if getattr(head, "bias", None) is not None:
        return "model: LM head with a bias"
    if processor.scale != 1 or processor.logits_as_input:
        return "model: scaled logits"
    if not is_matmul(runner.model, head, processor.soft_cap, processor.org_vocab_size):
        return "model: compute_logits"
    return None


def is_matmul(model: Any, head: Any, soft_cap: float | None, V: int) -> bool:
    """Test on five rows whether compute_logits is hidden @ weight.T, soft-capped.

    A row of zeros must give zeros, which exposes the smallest bias. Four random rows must give
    finite logits that equal the matmul up to rounding. With a sharded head each rank compares its
    columns.
    """
    weight = head.weight
    first, last = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    generator = torch.Generator(weight.device).manual_seed(0)
    size, fp32 = (5, weight.shape[1]), torch.float32
    hidden = torch.randn(size, device=weight.device, generator=generator, dtype=fp32)
    hidden[0] = 0
    with torch.inference_mode():
        hidden = hidden.to(weight.dtype)
        logits = model.compute_logits(hidden)
        expected = (hidden @ weight.T).float()[:, : last - first]
    if logits is None or logits.shape != (5, V):
        return False
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    logits = logits.float()[:, first:last]
    if not logits.isfinite().all() or (logits[0] != 0).any():
        return False
    return bool(((expected - logits).abs() <= 0.02 * logits.abs().amax()).all())

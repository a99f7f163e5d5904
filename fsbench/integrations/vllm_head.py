"""The LM head of a model that vLLM has loaded, if logits are what it says and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsbench.integrations.draw import Head
from fsbench.integrations.vllm_expected import TP_GROUP, find
from fsbench.kernels import VocabShard

_PLAIN = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
_HEADLESS = "model: no lm_head.weight and logits_processor"


class FoundHead(NamedTuple):
    """head: to draw from. weight: the engine's own. copied: bytes of head that are not weight's."""

    head: Head
    weight: Tensor
    copied: int

    def moved(self, runner: Any) -> bool:
        """Whether the weight may no longer be what is drawn from; the same on all ranks."""
        owner = head_owner(runner.model)
        # Whether a shard is a copy differs from rank to rank, and they have to look up together.
        if owner is None or self.copied or runner.parallel_config.tensor_parallel_size > 1:
            return True
        return bool(owner.lm_head.weight.data_ptr() != self.weight.data_ptr())


def head_owner(model: Any) -> Any | None:
    """The module with lm_head.weight and logits_processor: the model, or that which it wraps."""
    inner = getattr(model, "get_language_model", None)
    for each in (model, inner() if callable(inner) else None):
        head = getattr(each, "lm_head", None)
        if getattr(head, "weight", None) is not None and hasattr(each, "logits_processor"):
            return each
    return None


def find_head(runner: Any) -> FoundHead | str:
    """The LM head of a loaded model, or why the plug-in leaves this model to vLLM.

    All ranks of a model come here together, and find the same.
    """
    ranks = runner.parallel_config.tensor_parallel_size
    group = find(TP_GROUP)() if ranks > 1 else None
    reason = unfit(runner)
    if group is not None:
        reason = agreed(reason, group.cpu_group)
    if reason is not None:
        return reason
    owner: Any = head_owner(runner.model)
    weight = owner.lm_head.weight.detach()
    V, soft_cap = owner.logits_processor.org_vocab_size, owner.logits_processor.soft_cap
    if group is None:
        return FoundHead(Head(weight, V, soft_cap), weight, 0)
    steps = 0 if runner.speculative_config is None else runner.num_speculative_steps
    slots = max(4096, runner.max_num_reqs * (1 + steps))
    shard = VocabShard(weight, group.device_group, vocab_size=V, slots=slots)
    own = weight.untyped_storage().data_ptr() == shard.weight.untyped_storage().data_ptr()
    return FoundHead(Head(shard, V, soft_cap), weight, 0 if own else shard.weight.nbytes)


def find_draft_head(runner: Any) -> tuple[FoundHead, Tensor | None] | str:
    """(the drafter's LM head, d2t) of a loaded model, or why vLLM draws the drafts.

    d2t: int64 of each row of the head: its token of the target less the row's own number. Or None.
    """
    if runner.parallel_config.tensor_parallel_size > 1:
        return "engine: several GPUs"
    model = runner.speculator.model
    owner, d2t = head_owner(model), getattr(model, "draft_id_to_target_id", None)
    if owner is None:
        return _HEADLESS
    if owner.lm_head.weight.dtype != runner.speculator.dtype:
        return f"model: draft head in {owner.lm_head.weight.dtype}"
    logits_of = model.compute_logits
    if d2t is not None:  # logits are those of the target's tokens
        d2t = d2t.detach()
        tokens = d2t + torch.arange(len(d2t), device=d2t.device)
        model = SimpleNamespace(
            lm_head=owner.lm_head,
            logits_processor=owner.logits_processor,
            compute_logits=lambda hidden: logits_of(hidden)[:, tokens],
        )
    found = find_head(
        SimpleNamespace(
            model=model, parallel_config=runner.parallel_config, lora_config=runner.lora_config
        )
    )
    return found if isinstance(found, str) else (found, d2t)


def agreed(reason: str | None, group: Any) -> str | None:
    """The first reason that any rank of the group has, so that all do the same."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, reason, group)
    return next((each for each in found if each is not None), None)


def unfit(runner: Any) -> str | None:
    """Why logits of this rank are not those of an LM head that the kernels take, or None."""
    if runner.lora_config is not None:
        return "model: LoRA"
    owner = head_owner(runner.model)
    if owner is None:
        return _HEADLESS
    head, processor = owner.lm_head, owner.logits_processor
    weight = head.weight
    if type(head.quant_method).__name__ not in _PLAIN:
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
    """Whether compute_logits is hidden @ weight.T, soft-capped: tried on five rows.

    Of zeros all logits are 0, so that no bias is too small to be seen; of four random rows they are
    finite, and what the matmul gives but for rounding. Of a sharded head each rank compares its own
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
        theirs = model.compute_logits(hidden)
        ours = (hidden @ weight.T).float()[:, : last - first]
    if theirs is None or theirs.shape != (5, V):
        return False
    if soft_cap is not None:
        ours = soft_cap * torch.tanh(ours / soft_cap)
    theirs = theirs.float()[:, first:last]
    if not theirs.isfinite().all() or (theirs[0] != 0).any():
        return False
    return bool(((ours - theirs).abs() <= 0.02 * theirs.abs().amax()).all())

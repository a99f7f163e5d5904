"""vLLM 0.33.0: what differs from 0.26.0. Held to its source (`make check-engines`), never run."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fsbench.integrations import vllm_0_26
from fsbench.integrations.routing import Need
from fsbench.integrations.vllm_expected import (
    BAD_WORDS,
    BIAS,
    LOGPROB_IDS,
    PENALTIES,
    REQUESTS,
    RUNNER,
    RUNNER_V1,
    SAMPLER,
    STATES,
    find,
)

CONTEXT = "vllm.v1.worker.gpu.sample.logits_processor.interface:LogitsContext"
THINKING = "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState"

_OLD = vllm_0_26.PLAIN
_CONTEXT_FIELDS = (
    *("expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "expanded_local_pos"),
    *("input_ids", "pos", "seq_lens_upper_bound_np"),
)

EXPECTED = _OLD.but(
    "0.33.0",
    without=(
        f"{BIAS}.apply_logit_bias",
        f"{PENALTIES}.apply_penalties",
        f"{BAD_WORDS}.apply_bad_words",
    ),
    signatures={
        f"{RUNNER}.load_model": ("self", "load_dummy_weights", "args", "model", "kwargs"),
        f"{RUNNER}.reload_weights": (
            *("self", "weights_iterator", "weights_path", "is_checkpoint_format"),
        ),
        f"{RUNNER_V1}.load_model": ("self", "load_dummy_weights", "model"),
        f"{SAMPLER}.add_request": ("self", "req_idx", "sampling_params"),
        f"{BIAS}.apply": ("self", "logits", "ctx"),
        f"{PENALTIES}.apply": ("self", "logits", "ctx"),
        f"{BAD_WORDS}.apply": ("self", "logits", "ctx"),
    },
    fields={CONTEXT: _CONTEXT_FIELDS},
    attributes={
        RUNNER: (*_OLD.attributes[RUNNER], "batch_sharder"),
        SAMPLER: (
            *("compute_nans", "logprobs_mode", "sampling_states", "logits_processors"),
            *("logprob_token_ids_state", "thinking_budget_state", "trace_replay_state"),
            *("return_sampling_mask", "add_request"),
        ),
        THINKING: ("enabled", "use_thinking_budget"),
    },
    filled=(CONTEXT,),
)


class Adapter033(vllm_0_26.Adapter):
    """See vllm_0_26.Adapter. Biases, penalties and bad words are a list of logits processors."""

    expected = EXPECTED

    def parts(self, runner: Any) -> dict[str, Any]:
        sampler = runner.sampler
        named = {type(each).__name__: each for each in sampler.logits_processors}
        processors = {
            where: named[where.partition(":")[2]]
            for where in (BIAS, PENALTIES, BAD_WORDS)
            if where.partition(":")[2] in named
        }
        return {
            RUNNER: runner,
            SAMPLER: sampler,
            STATES: sampler.sampling_states,
            LOGPROB_IDS: sampler.logprob_token_ids_state,
            REQUESTS: runner.req_states,
            THINKING: sampler.thinking_budget_state,
            **processors,
        }

    def lacks(self, runner: Any, drafts: bool = False) -> str | None:
        sampler = runner.sampler
        if runner.batch_sharder is not None:
            return "engine: batch-sharded sampling"
        if sampler.trace_replay_state is not None or sampler.return_sampling_mask:
            return "engine: trace replay or sampling mask"
        if len(sampler.logits_processors) != 3:
            return "engine: custom logits processors"
        return super().lacks(runner)

    def needs(self, runner: Any, slots: np.ndarray) -> np.ndarray:
        needs = super().needs(runner, slots)
        thinking = runner.sampler.thinking_budget_state
        if thinking.enabled:
            needs = needs | np.where(thinking.use_thinking_budget[slots], Need.THINKING_BUDGET, 0)
        return needs

    def add_biases(self, runner: Any, batch: Any, logits: Tensor, penalties: bool) -> None:
        context = find(CONTEXT)(
            expanded_idx_mapping=batch.expanded_idx_mapping,
            idx_mapping=batch.idx_mapping,
            idx_mapping_np=batch.idx_mapping_np,
            expanded_local_pos=batch.expanded_local_pos,
            input_ids=batch.input_ids[batch.logits_indices],
            pos=batch.positions[batch.logits_indices],
            seq_lens_upper_bound_np=batch.seq_lens_cpu_upper_bound.numpy(),
        )
        parts = self.parts(runner)
        for where in (BIAS, PENALTIES, BAD_WORDS):
            if where != PENALTIES or penalties:
                parts[where].apply(logits, context)

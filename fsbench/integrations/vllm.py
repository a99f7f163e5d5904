"""flash_sample inside vLLM 0.22.1: a plug-in (entry point `vllm.general_plugins`).

    FSBENCH_VLLM=flash_sample vllm serve ...

Off unless the variable FSBENCH_VLLM names a sampler (fsbench.integrations.draw). It hooks into
vLLM's model runner V2, the default for Qwen3 and with VLLM_USE_V2_MODEL_RUNNER=1 for others:

    load_model           finds the LM head, and tries whether the model's compute_logits is
                         hidden @ weight.T (with a soft cap) and nothing else
    _dummy_sampler_run   compiles and captures the draw before vLLM measures what memory is left
    sample               draws: one graph in place of gather, LM head, logits pipeline, sampler

V2 replays the layers as a CUDA graph and samples behind it, kernel by kernel. This replays a graph
of its own (GraphedDraw), since for a small model the host is what a step waits for. Of a batch in
which every request feeds one token, hidden states and positions are views of the engine's own
buffers. Seed and temperature are copied to the GPU when they change. A request's noise
is a function of its seed and the position of the token that was fed, and of nothing else.

A batch that has anything else in it (penalties, bad words, logit bias, structured output, top-k,
top-p, min-p, log-probabilities, drafts) goes through vLLM's own code, the whole batch, unchanged.
`Counts` says how many tokens went which way, and why; `LLM.collective_rpc("fsbench_counts")`
returns it for each worker. A row without a finite logit, for which flash_sample has no token, gets
token 0: an engine cannot feed -1.

With FSBENCH_VLLM_MARKS=1 the LM head and the drawing are marked in torch profiles (also when vLLM
draws itself), for `fsbench e2e`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from fsbench.errors import EngineMismatch, InvalidArgument
from fsbench.integrations.draw import (
    DRAW_MARK,
    FLASH_SAMPLE,
    MATMUL_MARK,
    Draw,
    Head,
    known,
    make_draw,
)
from fsbench.integrations.graphed import GraphedDraw
from fsbench.integrations.vllm_interface import (
    ATTRIBUTES,
    MARKS,
    NO_LOGPROBS,
    NUM_SAMPLED,
    OUTPUT,
    RUNNER,
    RUNNER_V1,
    SWITCH,
    TP_GROUP,
    WORKER,
    check_attributes,
    check_signatures,
    check_version,
    find,
)
from fsbench.kernels import VocabShard
from fsbench.machine.packages import package_version


def register() -> None:
    """The entry point: called by vLLM in each of its processes. Does nothing unless switched on.

    Raises:
        InvalidArgument: FSBENCH_VLLM names no sampler.
        EngineMismatch: another version of vLLM, or one whose source is not as expected.
    """
    name = os.environ.get(SWITCH, "")
    marked = os.environ.get(MARKS, "") == "1"
    if not name and not marked:
        return
    if name not in ("", FLASH_SAMPLE) and name not in known():
        raise InvalidArgument(
            f"{SWITCH}: expected flash_sample or an exact sampler of `fsbench list`; got {name!r}"
        )
    check_version(package_version("vllm"))
    runner = find(RUNNER)
    if hasattr(runner, "_fsbench"):
        return
    check_signatures()
    _install(runner, find(RUNNER_V1), find(WORKER), name, marked)


class Counts:
    """Rows that became tokens: `served` by the plug-in, and left to vLLM by reason."""

    def __init__(self) -> None:
        self.served = 0
        self.left: Counter[str] = Counter()

    def as_dict(self) -> dict[str, Any]:
        return {"served": self.served, "left": dict(self.left)}


class Plugged:
    """The plug-in's part of one model runner.

    Args:
        draw: what draws in place of vLLM, or None: then `lacks` says why, and vLLM draws it all.
    """

    def __init__(self, draw: Draw | None, lacks: str = ""):
        self._draw = draw
        self._lacks = lacks
        self._captured = False
        self.counts = Counts()
        self._sent: tuple[np.ndarray, np.ndarray, Tensor, Tensor] | None = None

    def capture(self, hidden: Tensor) -> None:
        """Compile and capture the draw for up to as many rows as hidden [*, D] has."""
        if self._draw is not None and not self._captured and hidden.is_cuda:
            self._draw = GraphedDraw(self._draw, hidden.shape[0], hidden)
            self._captured = True

    def declines(self, runner: Any, batch: Any, grammar: object) -> str | None:
        """None if this batch can be served, else what it has that is left to vLLM."""
        if self._draw is None:
            return self._lacks
        if grammar is not None:
            return "structured output"
        if batch.num_draft_tokens:
            return "drafts"
        sampler, rows = runner.sampler, batch.idx_mapping_np
        if sampler.compute_nans:
            return "NaN counts"
        states = sampler.sampling_states
        if (states.num_logprobs[rows] != NO_LOGPROBS).any():
            return "logprobs"
        if sampler.logprob_token_ids_state.num_token_ids.np[rows].any():
            return "logprobs"
        if sampler.penalties_state.use_penalty[rows].any():
            return "penalties"
        if sampler.logit_bias_state.use_logit_bias[rows].any():
            return "logit bias"
        if sampler.bad_words_state.num_bad_words.np[rows].any():
            return "bad words"
        if (states.top_k.np[rows] != states.vocab_size).any():
            return "top-k"
        if (states.top_p.np[rows] != 1).any():
            return "top-p"
        if states.min_p.np[rows].any():
            return "min-p"
        return self._draw.declines(states.temperature.np[rows])

    def count(self, runner: Any, batch: Any, left: str | None) -> None:
        """Count the rows of a batch whose prompt is complete: those of other rows are discarded."""
        lengths = batch.seq_lens_cpu_upper_bound.numpy()[: batch.num_reqs]
        tokens = int((lengths >= runner.req_states.prefill_len.np[batch.idx_mapping_np]).sum())
        if left is None:
            self.counts.served += tokens
        else:
            self.counts.left[left] += tokens

    def tokens(self, runner: Any, hidden_states: Tensor, batch: Any) -> Tensor:
        """int64 [num_reqs]: the next token of every request of a batch that is not declined."""
        assert self._draw is not None
        states, rows = runner.sampler.sampling_states, batch.idx_mapping_np
        if batch.num_tokens == batch.num_reqs:  # one token of each: rows lie in order
            hidden = hidden_states[: batch.num_reqs]
            position = batch.positions[: batch.num_reqs]
        else:
            hidden = hidden_states[batch.logits_indices]
            position = batch.positions[batch.logits_indices]
        temperature, seed = self._sent_to_gpu(
            states.temperature.np[rows], states.seeds.np[rows], hidden
        )
        return self._draw(hidden, temperature, seed, position).clamp(min=0).long()

    def _sent_to_gpu(
        self, temperature: np.ndarray, seed: np.ndarray, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The batch's temperatures and seeds on the GPU; those of the last step if they are equal.

        Both arrays are copies (fancy indexing), so that the engine may change its own meanwhile.
        """
        if self._sent is not None:
            old_temperature, old_seed, *kept = self._sent
            if np.array_equal(temperature, old_temperature) and np.array_equal(seed, old_seed):
                return kept[0], kept[1]
        sent = (
            torch.from_numpy(temperature).to(like.device, non_blocking=True),
            torch.from_numpy(seed).to(like.device, non_blocking=True),
        )
        self._sent = (temperature, seed, *sent)
        return sent


def _install(runner: Any, runner_v1: Any, worker: Any, name: str, marked: bool) -> None:
    """Replace the methods of vLLM's classes. `name` is the sampler, or '' for vLLM's own."""
    load_model, dummy_run = runner.load_model, runner._dummy_sampler_run
    sample, load_model_v1 = runner.sample, runner_v1.load_model
    mark = _mark if marked else _no_mark

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        load_model(self, *args, **kwargs)
        if marked:
            self.model.compute_logits = _marked(self.model.compute_logits)
        self._fsbench = plug_in(self, name)

    def warm_up(self: Any, hidden_states: Tensor) -> None:
        dummy_run(self, hidden_states)
        self._fsbench.capture(hidden_states)

    def draw(self: Any, hidden_states: Tensor, input_batch: Any, grammar_output: object) -> Any:
        plugged = self._fsbench
        left = plugged.declines(self, input_batch, grammar_output)
        plugged.count(self, input_batch, left)
        with mark(DRAW_MARK):
            if left is not None:
                return sample(self, hidden_states, input_batch, grammar_output)
            return sampled(self, plugged.tokens(self, hidden_states, input_batch), input_batch)

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise EngineMismatch(
            f"{SWITCH}: expected vLLM's model runner V2; this engine runs V1. Set "
            "VLLM_USE_V2_MODEL_RUNNER=1, or unset the variable"
        )

    def fsbench_counts(self: Any) -> dict[str, Any]:
        return self.model_runner._fsbench.counts.as_dict()

    runner.load_model, runner._dummy_sampler_run, runner.sample = load, warm_up, draw
    runner_v1.load_model = refuse if name else load_model_v1
    worker.fsbench_counts = fsbench_counts
    runner._fsbench = Plugged(None, "not loaded")


def plug_in(runner: Any, name: str) -> Plugged:
    """The plug-in for a runner whose model is loaded. All ranks of a model come here together.

    Raises:
        EngineMismatch: the runner has not what is read of it.
        InvalidArgument: the sampler cannot take this LM head.
    """
    if not name:
        return Plugged(None, "vLLM's own")
    check_attributes("runner", runner, ATTRIBUTES["runner"])
    if runner.sampler is None:
        return Plugged(None, "no sampler on this rank")
    check_attributes("runner.sampler", runner.sampler, ATTRIBUTES["runner.sampler"])
    found = find_head(runner)
    return Plugged(None, found) if isinstance(found, str) else Plugged(make_draw(name, found))


def find_head(runner: Any) -> Head | str:
    """The LM head of a loaded model, or why the plug-in leaves this model to vLLM."""
    model = runner.model
    if runner.lora_config is not None:
        return "model: LoRA"
    head, processor = getattr(model, "lm_head", None), getattr(model, "logits_processor", None)
    if processor is None or head is None or getattr(head, "weight", None) is None:
        return "model: no lm_head.weight and logits_processor"
    weight = head.weight
    if type(head.quant_method).__name__ != "UnquantizedEmbeddingMethod":
        return "model: quantised LM head"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"model: LM head in {weight.dtype}"
    if processor.scale != 1 or processor.logits_as_input:
        return "model: scaled logits"
    V = processor.org_vocab_size
    if not _is_matmul(model, head, processor.soft_cap, V):
        return "model: compute_logits"
    if runner.parallel_config.tensor_parallel_size == 1:
        return Head(weight.detach(), V, processor.soft_cap)
    slots = max(4096, runner.max_num_reqs)
    shard = VocabShard(weight.detach(), find(TP_GROUP)().device_group, vocab_size=V, slots=slots)
    return Head(shard, V, processor.soft_cap)


def _is_matmul(model: Any, head: Any, soft_cap: float | None, V: int) -> bool:
    """Whether compute_logits is hidden @ weight.T, soft-capped: tried on four rows.

    Of a sharded head each rank compares its own columns.
    """
    weight = head.weight
    first, last = head.shard_indices.org_vocab_start_index, head.shard_indices.org_vocab_end_index
    generator = torch.Generator(weight.device).manual_seed(0)
    hidden = torch.randn(4, weight.shape[1], device=weight.device, generator=generator)
    with torch.inference_mode():
        hidden = hidden.to(weight.dtype)
        theirs = model.compute_logits(hidden)
        ours = (hidden @ weight.T).float()[:, : last - first]
    if theirs is None or theirs.shape != (4, V):
        return False
    if soft_cap is not None:
        ours = soft_cap * torch.tanh(ours / soft_cap)
    theirs = theirs.float()[:, first:last]
    return bool(((ours - theirs).abs() <= 0.02 * theirs.abs().amax()).all())


def sampled(runner: Any, tokens: Tensor, batch: Any) -> tuple[Any, Tensor, Tensor]:
    """What GPUModelRunner.sample returns, of tokens [num_reqs]."""
    ones = batch.seq_lens.new_ones(batch.num_reqs)
    num_sampled, num_rejected = find(NUM_SAMPLED)(
        ones,
        batch.seq_lens,
        batch.cu_num_logits,
        batch.idx_mapping,
        runner.req_states.prefill_len.gpu,
    )
    return find(OUTPUT)(tokens.view(-1, 1), None, None, ones), num_sampled, num_rejected


def _mark(name: str) -> AbstractContextManager[Any]:
    return record_function(name)


def _no_mark(name: str) -> AbstractContextManager[Any]:
    return nullcontext()


def _marked(compute_logits: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with _mark(MATMUL_MARK):
            return compute_logits(*args, **kwargs)

    return marked

"""A vLLM that fsbench.e2e.vllm_served can drive: one token per request and step, no model.

FAKE_VLLM in the environment: `die` (the process ends at the start), `fail` (its constructor
raises), `short` (requests end early), `slow` (a step takes a minute).
"""

import gc
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: F401

FAULT = os.environ.get("FAKE_VLLM", "")
STEP_S = 0.001


class Engine:
    def __init__(self, max_num_seqs):
        self._left = {}
        self._most = max_num_seqs

    def add_request(self, request_id, prompt, params):
        assert gc.get_freeze_count()  # as in vLLM's server
        assert isinstance(request_id, str) and set(prompt) == {"prompt_token_ids"}
        assert params.ignore_eos and params.output_kind is RequestOutputKind.DELTA
        self._left[request_id] = params.max_tokens - (FAULT == "short")
        assert len(self._left) <= self._most

    def has_unfinished_requests(self):
        return bool(self._left)

    def step(self):
        time.sleep(60 if FAULT == "slow" else STEP_S)
        outputs = []
        for name in list(self._left):
            self._left[name] -= 1
            token = SimpleNamespace(token_ids=[7])
            outputs.append(SimpleNamespace(request_id=name, outputs=[token]))
            if self._left[name] == 0:
                del self._left[name]
        return outputs


class LLM:
    def __init__(self, model, max_num_seqs, profiler_config, load_format, **options):
        print("vLLM prints this to standard output")
        if FAULT == "die":
            print("CUDA error: the device is gone", file=sys.stderr)
            os._exit(7)
        if FAULT == "fail":
            raise ValueError("no room for the KV cache")
        config = json.loads((Path(model) / "config.json").read_text())
        assert config["architectures"] == ["Qwen3ForCausalLM"] and load_format == "dummy"
        assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == os.environ["FSBENCH_VLLM_MARKS"] == "1"
        drafts = options.get("speculative_config")
        assert os.environ["FSBENCH_VLLM_DRAFTS"] == ("1" if drafts else "0")
        if drafts:
            drafter = json.loads((Path(drafts["model"]) / "config.json").read_text())
            assert drafter["num_hidden_layers"] == 1
            assert drafter["vocab_size"] == config["vocab_size"]
            assert options["compilation_config"]["cudagraph_capture_sizes"] == [3, 9]
        self._traces = Path(profiler_config["torch_profiler_dir"])
        self._since = None
        self.llm_engine = Engine(max_num_seqs)

    def collective_rpc(self, method):
        assert method == "fsbench_counts"
        return [{"served": 5, "left": {"top-k": 1}, "by": os.environ["FSBENCH_VLLM"]}]

    def start_profile(self):
        self._traces.mkdir(exist_ok=True)

    def stop_profile(self):
        """Write three steps of 100 us: 60 of layers, 30 of drawing (LM head: 20)."""
        events = []
        for begin in (0, 100, 200):
            for number, (name, start, us) in enumerate(
                (("layers", 0, 60), ("gemm", 60, 20), ("gumbel", 80, 10))
            ):
                call = {"correlation": 10 * begin + number}
                when = {"pid": 1, "tid": 1, "ph": "X"}
                host = begin + (5 if name == "layers" else 15 if name == "gemm" else 25)
                events += [
                    {**when, "cat": "cuda_runtime", "name": "launch", "ts": host, "dur": 1,
                     "args": call},
                    {**when, "cat": "kernel", "name": name, "ts": begin + start, "dur": us,
                     "args": call},
                ]  # fmt: skip
            for name, start, us in (("fsbench: draw", 10, 20), ("fsbench: LM head", 12, 8)):
                events.append(
                    {"pid": 1, "tid": 1, "ph": "X", "cat": "user_annotation", "name": name,
                     "ts": begin + start, "dur": us}
                )  # fmt: skip
        trace = self._traces / f"dp0_pp0_tp0.{time.time_ns()}.pt.trace.json"
        trace.write_text(json.dumps({"traceEvents": events}))

"""Of vllm.v1.engine.async_llm what the worker uses: a token per request each millisecond."""

import asyncio
import os
from types import SimpleNamespace


class AsyncLLM:
    @classmethod
    def from_engine_args(cls, engine_args):
        asyncio.get_running_loop()  # vLLM's starts a task in it
        assert not hasattr(engine_args, "profiler_config")  # no dict, in 0.26.0
        assert engine_args.load_format == "dummy" and engine_args.max_num_seqs == 3
        return cls()

    async def generate(self, prompt, sampling_params, request_id):
        assert isinstance(request_id, str) and set(prompt) == {"prompt_token_ids"}
        for _ in range(sampling_params.max_tokens - (os.environ.get("FAKE_VLLM") == "short")):
            await asyncio.sleep(0.001)
            yield SimpleNamespace(request_id=request_id, outputs=[SimpleNamespace(token_ids=[7])])

    async def collective_rpc(self, method):
        assert method == "fsbench_counts"
        return [{"served": 5, "left": {}, "by": os.environ["FSBENCH_VLLM"]}]

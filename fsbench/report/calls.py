"""What a user writes to call a recommended sampler, in Python and in vLLM."""

from __future__ import annotations

from textwrap import fill
from typing import Any

from fsbench.problem import Problem
from fsbench.provider import Provider

_ARGUMENTS = {
    "per_row_temperature": "temperature=temperature",
    "greedy_rows": "temperature=temperature",
    "mask": "mask=mask",
    "bias": "bias=bias",
    "num_samples": "num_samples=n",
    "logprob": "return_logprob=True",
    "entropy": "return_entropy=True",
    "rank": "return_rank=True",
    "top": "return_top=20",
}


def has_public_call(sampler: Provider, source: str, problem: Problem) -> bool:
    """Whether users can call it: a package's sampler, a public function, or by the vLLM plug-in."""
    plain = problem.device == "cuda" and problem.tp == 1 and not problem.filters
    return plain or bool(sampler.call) or ".kernels." not in source


def calls(
    sampler: Provider, source: str, problem: Problem, needs: list[str], as_measured: bool = True
) -> dict[str, str]:
    """Return what to write for a sampler: `python` and, where the plug-in has it, `vllm`.

    Args:
        source: module or file that defines the sampler.
        needs: capabilities that are asked for; those with an argument of the call are passed.
        as_measured: pass the arguments that the sampler itself fixes, such as the kernel.
    """
    sharded = problem.tp > 1
    filters = [f"{name}={getattr(problem, name)}" for name in problem.filters]
    call = sampler.call
    if not call:
        size = [f"B, {problem.D}, {problem.V}, {problem.dtype!r}", *filters]
        size += [f"temperature={problem.temperature:g}"] if problem.temperature != 1 else []
        size += [f"tp={problem.tp}"] if sharded else []
        size += ["device='cpu'"] if problem.device == "cpu" else []
        build, head = ("build_sharded", "shard") if sharded else ("build", "weight")
        python = (
            f"from fsbench.problem import Problem\nfrom {source} import PROVIDER\n"
            f"problem = Problem({', '.join(size)})\n"
            f"launch = PROVIDER.{build}(problem, {head})\n"
            "tokens = launch(hidden, seed, step)"
        )
        plain = (problem.device, problem.temperature) == ("cuda", 1) and not (
            filters or needs or sharded
        )
        vllm = {"vllm": f"FSBENCH_VLLM={sampler.name} vllm serve MODEL"} if plain else {}
        return {"python": python, **vllm}
    imports, first, given = call, "", ["weight"]
    if sharded:
        imports, given = f"VocabShard, {call}", ["shard"]
        first = "shard = VocabShard(weight_rows_of_this_rank, group)  # once, on all ranks\n"
    plug_in = "flash_sample"
    if call == "screened_sample":
        imports = imports.replace(call, f"prepare_head, {call}")
        first += f"head = prepare_head({'shard.weight' if sharded else 'weight'})  # once\n"
        given = ["head", "shard=shard"] if sharded else ["head"]
        plug_in = plug_in if sharded else "screened"
    options = [*filters, *(_ARGUMENTS[need] for need in needs if need in _ARGUMENTS)]
    fixed = problem.temperature != 1 and "temperature=temperature" not in options
    options += [f"temperature={problem.temperature:g}"] if fixed else []
    forced: dict[str, Any] = getattr(sampler.sample, "keywords", {})  # of a partial
    options += [f"{name}={value!r}" for name, value in forced.items() if as_measured]
    text = ", ".join(dict.fromkeys(["hidden", *given, "seed=seed", "offset=step", *options]))
    if len(text) + len(call) > 65:
        text = "\n" + fill(text, 70, initial_indent="    ", subsequent_indent="    ") + "\n"
    python = f"from fsbench.kernels import {imports}\n{first}sample = {call}({text})"
    serve = f"FSBENCH_VLLM={plug_in} vllm serve MODEL"
    return {
        "python": python,
        "vllm": f"{serve} --tensor-parallel-size {problem.tp}" if sharded else serve,
    }

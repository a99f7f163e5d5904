"""Hold the rivals of baselines/ that need a GPU to the source of their packages.

    python tools/check_rivals.py [--source vllm-0.26.0=FOLDER ...]

A part of `make check-engines`: downloads each wheel (60 MB at most, but for vLLM's), keeps its
Python files in build/engines, and compares the parameters of what a baseline calls with those that
it gives, without importing the package. Prints a line for each difference; exit code 1 for one.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from check_engines import Source, download

_SAMPLE = "vllm.v1.worker.gpu.sample"
_FLASHINFER = {
    "flashinfer.sampling:sampling_from_logits": ("logits", "indices", "seed", "offset"),
    "flashinfer.sampling:sampling_from_probs": ("probs", "seed", "offset"),
    "flashinfer.sampling:softmax": ("logits", "temperature"),
    "flashinfer.sampling:top_k_top_p_sampling_from_logits": (
        *("logits", "top_k", "top_p", "indices", "seed", "offset"),
    ),
    "flashinfer.sampling:top_k_top_p_sampling_from_probs": (
        *("probs", "top_k", "top_p", "filter_apply_order", "seed", "offset"),
    ),
}


@dataclass(frozen=True)
class Rival:
    """A release that baselines call.

    calls: function -> the parameters that are given to it; those without a default must be among
        them. attributes: as of ExpectedApi.
    """

    package: str
    version: str
    calls: dict[str, tuple[str, ...]]
    attributes: dict[str, tuple[str, ...]] = field(default_factory=dict)


RIVALS = (
    Rival(
        "vllm",
        "0.26.0",
        {
            "vllm.v1.worker.gpu.states:RequestState.__init__": (
                *("max_num_reqs", "max_model_len", "max_num_batched_tokens"),
                *("num_speculative_steps", "vocab_size", "device"),
            ),
            f"{_SAMPLE}.sampler:Sampler.__init__": (
                *("max_num_reqs", "vocab_size", "device", "req_states", "logprobs_mode"),
            ),
            f"{_SAMPLE}.sampler:Sampler.add_request": ("req_idx", "prompt_len", "sampling_params"),
            f"{_SAMPLE}.sampler:Sampler.apply_staged_writes": (),
            f"{_SAMPLE}.sampler:Sampler.sample": (
                *("logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids"),
                *("expanded_local_pos", "return_logprobs"),
            ),
            f"{_SAMPLE}.logprob:compute_token_logprobs": ("logits", "token_ids"),
        },
        attributes={
            f"{_SAMPLE}.sampler:Sampler": ("use_flashinfer", "sampling_states"),
            f"{_SAMPLE}.states:SamplingStates": ("seeds",),
        },
    ),
    Rival("flashinfer-python", "0.6.9", _FLASHINFER),
    Rival(
        "flashinfer-python",
        "0.7.2.post1",
        {
            **_FLASHINFER,
            "flashinfer.cake_sampling:cake_sampling_route": ("probs", "top_k", "top_k_max"),
            "flashinfer.cake_sampling:top_k_top_p_sampling_from_probs": (
                *("probs", "top_k", "top_p", "top_k_max"),
            ),
        },
    ),
)


def check(rival: Rival, root: Path) -> list[str]:
    """A line for each thing that differs between a rival's calls and the source below root."""
    source, lines = Source(root), []
    for where, given in rival.calls.items():
        known = source.parameters(where)
        if known is None:
            lines.append(f"{where}: expected it; there is none")
            continue
        known = [name for name in known if name != "self"]
        needed = source.required(where)
        if unknown := [name for name in given if name not in known]:
            lines.append(f"{where}: expected parameters {', '.join(unknown)}; got {known}")
        if absent := [name for name in needed if name not in (*given, "self")]:
            lines.append(f"{where}: needs {', '.join(absent)}, which are not given")
    for where, attributes in rival.attributes.items():
        there = source.attributes(where) or set()
        if absent := [name for name in attributes if name not in there]:
            lines.append(f"{where}: expected attributes {', '.join(absent)}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--source", action="append", default=[], metavar="PACKAGE-VERSION=FOLDER")
    given = dict(each.split("=", 1) for each in parser.parse_args(arguments).source)
    failed = 0
    for rival in RIVALS:
        name = f"{rival.package}-{rival.version}"
        root = given.get(name) or download(rival.package, rival.version)
        lines = check(rival, Path(root))
        failed += len(lines)
        print(f"{name}: {len(lines) or 'no'} differences in {root}")
        for line in lines:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`fsbench warm`: compile the kernels of an engine before it starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import product
from typing import Annotated, Any

from fsbench.cli.options import (
    WORDS,
    Dtype,
    HiddenSizes,
    Json,
    Models,
    VocabularySizes,
    integers,
    one_of,
    option,
    whole,
)
from fsbench.cli.parsing import int_list, shapes
from fsbench.cli.tables import console, table
from fsbench.cores import usable_cores
from fsbench.errors import InvalidArgument, unknown_name

ENGINES = {"vllm": "flash_sample", "vllm-screened": "screened"}
"""Value of --request for a whole engine -> sampler of its plug-in."""


def _chips() -> Iterable[str]:
    from fsbench.kernels.warming.offline import CHIPS

    return CHIPS


def warm(
    models: Models = None,
    d: HiddenSizes = None,
    v: VocabularySizes = None,
    dtype: Dtype = "bf16",
    batch: Annotated[str, option("--batch", integers(), "Batch sizes B, comma list.")] = "1,16,64",
    request: Annotated[
        str,
        option(
            "--request",
            WORDS,
            "Comma list of plain, rows (T, seed and step of each row), greedy, logprobs, filters "
            "(top-k and top-p), row-filters; vllm and vllm-screened: all that the plug-in of vLLM "
            "launches with flash_sample or screened, for up to the largest --batch.",
        ),
    ] = "plain,rows",
    tp: Annotated[
        int, option("--tp", whole(), "GPUs of the model, for --request vllm: a shard on each.")
    ] = 1,
    gpu: Annotated[
        str | None,
        option("--gpu", one_of(_chips), "GPU to compile for. Default: that of this machine."),
    ] = None,
    processes: Annotated[
        int | None, option("--processes", whole(), "Default: the number of usable CPUs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of flash_sample and truncated_sample into Triton's cache, in parallel.

    Processes with the same fsbench, Triton, ptxas and TRITON_ variables then compile nothing at
    their first calls of these shapes. With --gpu no GPU is needed; no GPU memory is used.
    """
    from fsbench.integrations.compile_ahead import PADDING, EngineSpec, engine_calls
    from fsbench.kernels.warming.offline import CHIPS, DTYPES, REQUESTS, Chip, Shape, compiled

    heads = shapes(models or [], d, v)
    if not heads:
        raise InvalidArgument("--model: expected an LM head, or --d and --v; got none")
    if dtype not in DTYPES:
        raise InvalidArgument(f"--dtype: expected {' or '.join(DTYPES)}, as GPUs do; got {dtype}")
    requests = [name.strip() for name in request.split(",")]
    for name in requests:
        if name not in (*REQUESTS, *ENGINES):
            raise unknown_name("--request", name, (*REQUESTS, *ENGINES))
    if tp > 1 and requests != ["vllm"]:
        raise InvalidArgument(f"--tp: expected 1, or --request vllm; got {tp} and {request}")
    batches = int_list(batch, "--batch")
    calls: list[Callable[[], object]] = []
    for (_, D, V), kind in product(heads, requests):
        if kind in ENGINES:
            padded = -(-V // PADDING) * PADDING
            if padded % tp:
                raise InvalidArgument(f"--tp: expected a divisor of {padded} rows; got {tp}")
            spec = EngineSpec(ENGINES[kind], V, padded, D, dtype, None, max(batches), ranks=tp)
            calls += [call for each in spec.of_all_ranks() for call in engine_calls(each)]
        else:
            calls += [Shape(kind, B, D, V, dtype) for B in batches]
    chip = CHIPS[gpu] if gpu else Chip.current()
    begin = time.perf_counter()
    kernels = []
    screen = console(stderr=True)
    num_processes = processes or usable_cores()
    screen.print(
        f"{chip.name}: {len(calls)} kinds of calls, {num_processes} processes; starting them"
    )
    for each in compiled(chip, calls, num_processes):
        kernels.append(each)
        spent = "in the cache" if each.cached else f"{each.seconds:.1f} s"
        screen.print(f"[{each.number}/{each.total}] {each.kernel}: {spent}", markup=False)
    took = time.perf_counter() - begin
    rows: list[dict[str, Any]] = [
        {
            "kernel": each.kernel,
            "call": str(calls[each.call]),
            "seconds": each.seconds,
            "cached": each.cached,
        }
        for each in kernels
    ]
    if as_json:
        print(json.dumps({"gpu": chip.name, "seconds": took, "kernels": rows}, indent=2))
        return
    columns = [
        *(("kernel", "{kernel:<}"), ("first needed by", "{call:<}"), ("s", "{seconds:.1f}")),
        ("in the cache before", "{cached}"),
    ]
    shown = [{**row, "cached": "yes" if row["cached"] else "no"} for row in rows]
    console().print(table(columns, shown))
    new = [each.seconds for each in kernels if not each.cached]
    print(
        f"{len(kernels)} kernels for {chip.name}: {len(new)} compiled in {took:.1f} s, "
        f"{sum(new):.1f} s one after the other"
    )

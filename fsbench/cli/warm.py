"""`fsbench warm`: compile what an engine will launch, before it starts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from typing import Annotated

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
from fsbench.cli.tables import console, plain_table
from fsbench.errors import InvalidArgument, unknown_name


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
            "(top-k and top-p) and row-filters.",
        ),
    ] = "plain,rows",
    gpu: Annotated[
        str | None,
        option("--gpu", one_of(_chips), "A GPU that is not here. Default: the one that is."),
    ] = None,
    processes: Annotated[
        int | None, option("--processes", whole(), "Default: the CPUs that this one may use.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels of flash_sample and truncated_sample into Triton's cache, in parallel.

    Another process with the same fsbench, Triton, ptxas and TRITON_ variables finds them there, and
    its first calls of these shapes compile nothing. No GPU is needed with --gpu, no memory with
    either.
    """
    from fsbench.kernels.warming.offline import CHIPS, DTYPES, REQUESTS, Chip, Shape, compiled

    heads = shapes(models or [], d, v)
    if not heads:
        raise InvalidArgument("--model: expected an LM head, or --d and --v; got none")
    if dtype not in DTYPES:
        raise InvalidArgument(f"--dtype: expected {' or '.join(DTYPES)}, as GPUs do; got {dtype}")
    kinds = [name.strip() for name in request.split(",")]
    for name in kinds:
        if name not in REQUESTS:
            raise unknown_name("--request", name, REQUESTS)
    wanted = [
        Shape(kind, B, D, V, dtype)
        for _, D, V in heads
        for kind in kinds
        for B in int_list(batch, "--batch")
    ]
    chip = CHIPS[gpu] if gpu else Chip.here()
    begin = time.perf_counter()
    found = []
    screen = console(stderr=True)
    for each in compiled(chip, wanted, processes or len(os.sched_getaffinity(0))):
        found.append(each)
        screen.print(f"{each.kernel}: {'was there' if each.cached else f'{each.seconds:.1f} s'}")
    took = time.perf_counter() - begin
    if as_json:
        rows = [{**each._asdict(), "shape": each.shape._asdict()} for each in found]
        print(json.dumps({"gpu": chip.name, "seconds": took, "kernels": rows}, indent=2))
        return
    words = ("kernel", "first needed by", "")
    table = plain_table(headings=(*words[:2], "s", "in the cache before"), left=words)
    for each in found:
        at = f"{each.shape.request} B={each.shape.B} D={each.shape.D} V={each.shape.V}"
        table.add_row(each.kernel, at, f"{each.seconds:.1f}", "yes" if each.cached else "no")
    console().print(table)
    new = [each.seconds for each in found if not each.cached]
    print(
        f"{len(found)} kernels for {chip.name}: {len(new)} compiled in {took:.1f} s, "
        f"{sum(new):.1f} s one after the other"
    )

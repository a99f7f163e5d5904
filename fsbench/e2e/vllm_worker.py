"""A process with one vLLM engine and one sampler: `python -m fsbench.e2e.vllm_worker`.

It reads one JSON object per line from standard input and answers each with one on standard output:

    {"do": "start", "folder": ..., "tp": ..., ...}    -> {"ok": {}}          see vllm_served
    {"do": "decode", "b": 16, "requests": "plain"}    -> {"ok": Decoded's fields}
    {"do": "profile", "b": 16, "requests": "plain"}   -> {"ok": Profile's fields}
    {"do": "counts"}                                  -> {"ok": {...} or null}
    {"do": "stop"}                                    -> {"ok": {}}, and the process ends

or with {"error": text}. vLLM's output goes to standard error. The environment chooses the sampler
(fsbench.integrations.vllm) before vLLM is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fsbench import e2e
from fsbench.errors import describe


def answer(served: list[Any], request: dict[str, Any]) -> Any:
    """Carry out a request. served: the engine in a list, empty until it is started."""
    action = request.pop("do")
    if action == "start":
        served.append(e2e.vllm_served.ServingEngine(**request))
        return {}
    if action == "decode":
        return asdict(served[0].decode(**request))
    if action == "profile":
        return served[0].profile(**request)
    if action == "counts":
        return served[0].counts()
    return {}


def serve(lines: Any, send: Callable[[str], None]) -> None:
    """Answer requests until one says stop, or there are no more."""
    served: list[Any] = []
    for line in lines:
        request = json.loads(line)
        last = request["do"] == "stop"
        try:
            reply = {"ok": answer(served, request)}
        except Exception as error:  # the parent process handles it
            reply = {"error": describe(error)}
        send(json.dumps(reply))
        if last:
            return


def main() -> None:
    # vLLM and its processes print to standard output: redirect it to standard error.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, lambda text: print(text, file=channel, flush=True))


if __name__ == "__main__":
    main()

"""Run the check that must find each bug of a released sampler, and record it as verify does.

    PYTHONPATH=tests/support python tools/audit_planted.py results/cpu/audit-20261123/planted.jsonl

The samplers are KNOWN in tests/support/planted_bugs.py, on the CPU, fp32, T = 1 and 0.6.
docs/results/audit.md shows the record. This takes ten minutes with one thread.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from fsbench.cli.verify import judged, recorder
from fsbench.discover import Found


def main(path: Path) -> None:
    bugs = importlib.import_module("planted_bugs")
    with recorder(path, print) as record:
        for bug in sorted(bugs.KNOWN, key=lambda bug: (bug in bugs.IN_THE_FAR_TAIL, bug)):
            sampler, check = {**bugs.BUGS, **bugs.IN_THE_FAR_TAIL}[bug][:2]
            entries = judged(
                [Found(bug, "tests/support/planted_bugs.py", sampler)],
                named=True,
                device="cpu",
                dtype="fp32",
                temperatures=[1.0, 0.6],
                tier="full" if bug in bugs.IN_THE_FAR_TAIL else "ci",
                only=[check],
                record=lambda line, bug=bug: record(  # type: ignore[misc]
                    {**line, "provider": bug} if "provider" in line else line
                ),
            )
            list(entries)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

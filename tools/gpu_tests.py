"""Run the tests that need a GPU: `make test-gpu`, or `make test-gpu PART=kernels`.

Tests that compile kernels run in one process per core. Tests that time the GPU (marked `alone`)
run afterwards in one process, because other work on the GPU would change what they measure.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

PARALLEL = ["-n", "auto", "--dist", "worksteal", "-m", "gpu and not alone"]

PARTS = {
    "kernels": ["tests/kernels", *PARALLEL],
    "samplers": ["tests", "--ignore=tests/kernels", *PARALLEL],
    "alone": ["tests", "-m", "gpu and alone"],
}
"""Part -> arguments of pytest. Each takes at most ten minutes on 16 cores, kernel cache empty."""


def run_part(arguments: list[str]) -> Counter[str]:
    """Run pytest and return how many tests had each outcome; `stopped` if pytest itself failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", *arguments, f"--junitxml={report}"]
        code = subprocess.run(command).returncode
        if not report.exists():
            return Counter(stopped=1)
        (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return Counter(
        passed=counts["tests"] - failed - counts["skipped"],
        failed=failed,
        skipped=counts["skipped"],
        stopped=int(code not in (0, 1)),  # 1: tests failed; else pytest was interrupted or misused
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"any of {', '.join(PARTS)}; all by default")
    parts = parser.parse_args().parts or [*PARTS]
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"PART: expected {', '.join(PARTS)}; got {', '.join(unknown)}")
    start = time.monotonic()
    counts = Counter[str]()
    for part in parts:
        counts += run_part(PARTS[part])
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        f" in {time.monotonic() - start:.0f} s"
        + (f"; pytest stopped early in {counts['stopped']} parts" if counts["stopped"] else "")
    )
    return 1 if counts["failed"] or counts["stopped"] else 0


if __name__ == "__main__":
    sys.exit(main())

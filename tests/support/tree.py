"""Where things are in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
H200 = RESULTS / "h200"

FOLDERS = {"fsbench.kernels": "kernels", "fsbench.baselines": "baselines", "fsbench": "fsbench"}
"""Package -> folder; the first two are links in fsbench/ to folders beside it."""

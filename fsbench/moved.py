"""The modules that had another name before 0.2: the old name still imports, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "attribution": "analysis.attribution",
    "breakdown": "records.breakdown",
    "caches": "machine.caches",
    "compare": "analysis.comparisons",
    "compare.paper": "analysis.comparisons.paper",
    "compare.runs": "analysis.comparisons.runs",
    "device_state": "machine.device_state",
    "diagnosis": "cli.diagnosis",
    "disk": "records.disk",
    "distributed": "measure.distributed",
    "doubts": "analysis.doubts",
    "e2e.figure": "figures.end_to_end",
    "energy": "measure.energy",
    "environment": "machine.environment",
    "figure_parts": "figures.parts",
    "filters_figure": "figures.filters",
    "hardware": "machine.hardware",
    "iomodel": "records.iomodel",
    "logits_store": "analysis.logits_store",
    "plan": "measure.plan",
    "plotstyle": "figures.style",
    "plotting": "figures.configuration",
    "preparing": "measure.preparing",
    "presets": "measure.presets",
    "ranks": "measure.supervisor",
    "recommend": "analysis.recommend",
    "report": "figures.report",
    "results": "records.store",
    "runner": "measure.runner",
    "scaling": "analysis.scaling",
    "scaling_figure": "figures.scaling",
    "simple.figures": "figures.hotvocab",
    "stats": "records.stats",
    "summary": "records.summary",
    "tables": "analysis.tables",
    "timers.cupti": "timers.gpu.cupti",
    "timers.events": "timers.gpu.events",
    "timers.l2": "timers.gpu.l2",
    "tuning": "measure.tuning",
    "winners": "figures.winners",
}
"""Names below fsbench: old -> new."""


class OldNames(MetaPathFinder, Loader):
    """Imports the module of the new name in place of the old one's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an old name, or None."""
        package, _, name = fullname.partition(".")
        if package != __package__ or name not in MOVED:
            return None
        return ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into the place of `module`, which is empty."""
        old = module.__name__
        new = f"{__package__}.{MOVED[old.removeprefix(f'{__package__}.')]}"
        warnings.warn(f"{old} is {new} since fsbench 0.2", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)

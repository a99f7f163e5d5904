"""The paper's Tables 1 and 4 to 9 as data: their only copy, as printed.

Each table is a CSV file in this folder. paper.toml names the source of the tables, and the sampler
of fsbench that corresponds to each method of the paper.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr
from fsbench.paper.source import GPUS, source

if TYPE_CHECKING:
    from fsbench.paper.tables import speedups as speedups
    from fsbench.paper.tables import table as table

__all__ = ["GPUS", "source", "speedups", "table"]

# Frames of pandas, which takes half a second to load.
if not TYPE_CHECKING:  # to mypy a name that is not imported above is an error
    __getattr__ = lazy_getattr(__name__, tables=("speedups", "table"))

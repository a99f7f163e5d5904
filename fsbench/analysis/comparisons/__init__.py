"""Results beside other results: two runs (runs.py), or a run and the paper's tables (paper.py)."""

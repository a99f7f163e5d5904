"""The options of a run that takes no time: tiny problems, and a timer that only counts."""

TINY = ["--device", "cpu", "--d", "16", "--v", "50", "--batch", "1,3", "--dtype", "fp32"]
TINY += ["--timer", "fake", "--warmup", "0", "--iters", "4", "--rounds", "2", "--no-check"]

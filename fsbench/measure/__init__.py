"""From a plan to timed samples: what is run, made ready, timed in rounds, over ranks, and tuned.

May import: errors, problem, provider, inputs, graphs, discover, machine, timers, records, verify.
"""

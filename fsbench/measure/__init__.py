"""Measuring: a plan of cells, samplers made ready and verified, the timed loop, ranks, energy.

May import: verify, reference, timers, machine, records; the contract with inputs, graphs and
discover.
"""

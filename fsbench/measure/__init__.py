"""Measuring: a plan of cells, samplers made ready and verified, the timed loop, energy; the
processes that do it, and who supervises them.

May import: verify, reference, timers, machine, records; the contract with inputs, graphs and
discover.
"""

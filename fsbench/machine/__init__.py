"""Facts about the machine: GPUs, CPU, clocks, caches, packages, and the record of them.

May import: the contract.
"""

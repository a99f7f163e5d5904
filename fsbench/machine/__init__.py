"""What the machine is: its GPUs and CPU, their clocks, its caches, and the record of all that.

May import: the contract.
"""

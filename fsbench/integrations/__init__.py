"""flash_sample inside serving engines: one engine per file, no change to the engine's source.

May import: fsbench.kernels as any user does, machine, the contract with discover.
"""

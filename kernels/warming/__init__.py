"""`fsbench warm`: compile the kernels of public calls, for a GPU that need not be present.

May import: everything up to the public calls, which it runs. Only the command imports it.
"""

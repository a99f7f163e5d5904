"""`fsbench warm`: compiling what public calls launch, for a GPU that need not be there.

May import: everything up to the public calls, as these are run. The command alone imports it.
"""

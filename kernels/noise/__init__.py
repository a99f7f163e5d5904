"""The noise contract: which random number belongs to which token, and how candidates are packed.

May import: nothing of kernels but configs.gpu, to launch.
"""

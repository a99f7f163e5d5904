"""The noise contract: which random number belongs to which token, and how candidates are packed.

Every kernel that calls device code of another file has some of this folder's, so the keys under
which Triton keeps kernels are settled here.

May import: nothing of kernels but configs.gpu, to launch, and configs.cache_keys.
"""

from fsbench.kernels.configs import cache_keys

cache_keys.settle()

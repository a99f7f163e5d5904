"""The noise contract: the random number of each token, and packed candidates.

Every kernel imports this folder, so it also settles the keys of Triton's kernel cache.

May import: nothing of kernels but configs.gpu, to launch, and configs.cache_keys.
"""

from fsbench.kernels.configs import cache_keys

cache_keys.settle()

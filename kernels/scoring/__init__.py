"""Log-probabilities of given tokens: `score`.

May import: the api of fused, call, device, checks, noise, configs.
"""

"""Log-probabilities of given tokens: `score`, and its gradient.

May import: the api of fused, call, device, checks, noise, configs.
"""

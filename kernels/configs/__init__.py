"""Tile shapes: what may be chosen, what is shipped for which GPU, and the choice of a call.

May import: nothing of kernels.
"""

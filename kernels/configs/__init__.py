"""Tile shapes: the configs, the shipped tables for each GPU, and the choice for a call.

May import: nothing of kernels.
"""

"""This machine: its GPUs, its packages, its caches, and the state of its device between steps.

May import: errors.
"""

"""Validation of the arguments of public calls, before anything is allocated or launched.

May import: configs.
"""

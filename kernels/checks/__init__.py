"""What the public calls refuse, before anything is allocated or launched.

May import: configs.
"""

"""What a run leaves on disk, and what follows from it alone: summary, model, statistics.

May import: the contract; no torch.
"""

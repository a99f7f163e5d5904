"""Records of a run on disk, and tables derived from them: summary, I/O model, statistics.

May import: the contract; no torch.
"""

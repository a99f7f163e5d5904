"""What a run leaves on disk: raw samples, `results.csv`, statistics, and the I/O model beside them.

May import: errors, problem. Nothing here needs torch, triton or a GPU.
"""

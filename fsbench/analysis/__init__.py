"""What results say: tables of speedups, scaling, advice, doubts, comparisons.

May import: errors, problem, provider, paper, records. Nothing here needs torch, triton or a GPU.
"""

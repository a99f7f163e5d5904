"""All that draws: one file per figure, and the HTML report.

May import: errors, provider, records, analysis, and of simple what reads its tables. Nothing here
needs torch, triton or a GPU.
"""

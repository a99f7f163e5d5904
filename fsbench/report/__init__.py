"""Results as tables, advice, comparisons, and the HTML report; `figures` draws.

May import: records, paper, simple's model, the contract; no torch.
"""

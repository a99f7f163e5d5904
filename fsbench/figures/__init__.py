"""Everything that draws, and the report that shows it.

May import: analysis, records, simple's model, the contract; no torch.
"""

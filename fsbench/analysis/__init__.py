"""Conclusions from records: tables, comparisons with other runs and the paper, recommendations.

May import: records, paper, the contract; no torch.
"""

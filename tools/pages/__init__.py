"""What the pages of README.md and docs/ quote: tables and sentences made of records and of code.

`make docs` writes them into the pages, between `<!-- begin: NAME ARGUMENT ... -->` and
`<!-- end -->`. A block is a function with the decorator `block`; blocks.py has what they share.
"""

"""Tables and numbers of README.md and docs/, made of records and of code.

`make docs` writes them into the pages, between `<!-- begin: NAME ARGUMENT ... -->` and
`<!-- end -->`. A block is a function with the decorator `block`; blocks.py has what they share.
"""

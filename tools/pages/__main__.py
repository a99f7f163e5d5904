"""`python -m pages`, with tools/ on the path: what `make docs` runs."""

from pages.write import main

main()

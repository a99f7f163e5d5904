"""`python -m fsbench`."""

from fsbench.cli import main

if __name__ == "__main__":
    main()

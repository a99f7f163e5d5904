"""Entry point of the console script `fsbench` and of `python -m fsbench`."""

from importlib import import_module

from fsbench import interrupts


def main() -> None:
    """Import the commands and run one; a signal meanwhile is one line, never a traceback."""
    interrupts.exit_at_once()
    try:
        import_module("fsbench.cli").main()
    finally:
        interrupts.exit_at_once()  # Python may take a second to end


if __name__ == "__main__":
    main()

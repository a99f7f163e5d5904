"""What tests of calls like an earlier one share. Their fixtures: tests/kernels/conftest.py."""


class Checked(Exception):
    """The call went by the checks."""

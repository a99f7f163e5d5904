"""`fsbench plot`."""


def plot() -> None:
    raise NotImplementedError

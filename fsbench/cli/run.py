"""`fsbench run`."""


def run() -> None:
    raise NotImplementedError

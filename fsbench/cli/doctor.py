"""`fsbench doctor`."""


def doctor() -> None:
    raise NotImplementedError

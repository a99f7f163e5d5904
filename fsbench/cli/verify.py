"""`fsbench verify`."""


def verify() -> None:
    raise NotImplementedError

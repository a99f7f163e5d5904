"""`fsbench iomodel`."""


def iomodel() -> None:
    raise NotImplementedError

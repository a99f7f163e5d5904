"""`fsbench list`."""


def list_() -> None:
    raise NotImplementedError

"""A type without ``__module__``, as C code makes them: SWIG 4.1 to 4.3 for its proxies, of which faiss is full."""


class _Without(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]
        raise AttributeError("__module__")


class SwigPyObject(metaclass=_Without):
    """What a proxy of SWIG refers to."""

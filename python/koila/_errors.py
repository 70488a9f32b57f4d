"""The errors of koila. Importing this does not import torch: `OutOfMemory`, which is also torch's own, is made when first asked for."""


class KoilaError(Exception):
    """Base of all errors of koila."""


class UnsupportedError(KoilaError, RuntimeError):
    """This cannot be done here; the text says what and what to do instead."""


def __getattr__(name: str):
    if name == "OutOfMemory":
        import torch

        class OutOfMemory(KoilaError, torch.OutOfMemoryError):
            """Even the smallest piece does not fit into the memory."""

        OutOfMemory.__module__ = __name__
        OutOfMemory.__qualname__ = "OutOfMemory"
        globals()["OutOfMemory"] = OutOfMemory
        return OutOfMemory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

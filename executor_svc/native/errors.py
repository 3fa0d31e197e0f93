"""The one error of this package."""


class NativeUnavailableError(Exception):
    """The C library cannot serve here; the message says why, in one line."""

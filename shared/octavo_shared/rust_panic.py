"""What a library in Rust raises when it panics: not an `Exception`, and of a class that cannot be imported."""


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked; an interrupt or a cancellation is none."""
    return any(kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime" for kind in type(error).__mro__)


def words_of(error: BaseException) -> str:
    """Return in one line why a library in Rust refuses a file or a text.

    Raises: BaseException: the error, if it is neither an `Exception` nor a panic.
    """
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    return " ".join(str(error).split())

"""Errors that only the scheduler has; the tree they belong to is in shared/errors.py."""

from shared.errors import OctavoServiceError


class TokenizerFileError(OctavoServiceError):
    """A tokenizer file is missing or broken; the model cannot be served.

    Args:
        file: Name or path of the file.
        reason: The rest of the sentence, for example "is missing".
    """

    def __init__(self, file: str, reason: str) -> None:
        self.file = file
        super().__init__(f"{file} {' '.join(reason.split())}")

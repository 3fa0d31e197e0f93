"""How long work on a model reports where it stands, and why it failed.

`octavo.models.store` and its parts call a `ProgressCallback`; `octavo.models.command` draws it as bars.
"""

from typing import Protocol

from octavo.errors import OctavoError


class ModelPrepareError(OctavoError):
    """A model could not be prepared; the message is one sentence for the user."""


class ProgressCallback(Protocol):
    """Receives how far a stage of the work is."""

    def __call__(self, stage: str, completed: int, total: int | None) -> None:
        """Take note of progress.

        Args:
            stage: What is being done, for people; a new text starts a new bar.
            completed: How much of this stage is done, in the stage's own unit (mostly bytes).
            total: All of it in the same unit; None if that cannot be known.
        """


def ignore_progress(stage: str, completed: int, total: int | None) -> None:
    """Ignore the progress."""

"""Errors of the executor alone; the tree is in shared/errors.py."""

from shared.errors import OctavoServiceError, StepFailedError


class ModelLoadError(OctavoServiceError):
    """The model cannot be loaded; the message is one sentence that names the file or the setting."""


class UnsupportedModelError(ModelLoadError):
    """The model asks for what our own code does not have; that of transformers may have it."""


class DeviceLostError(StepFailedError):
    """The device computes nothing any more; only a new process gets it back."""


class UnknownArchitectureError(UnsupportedModelError):
    """There is no code of our own for this architecture at all."""

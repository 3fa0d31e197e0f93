"""What can keep a load from being run, or one of its requests from being answered."""

from octavo.errors import OctavoError


class BenchError(OctavoError):
    """The load cannot be run, or its result is worth nothing; one sentence for a person."""


class RequestFailedError(OctavoError):
    """One request got no complete answer; requests that fail alike have equal messages."""

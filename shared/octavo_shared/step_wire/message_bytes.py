"""Decodes the bytes of a peer: malformed bytes give an error with a sentence, not a traceback."""

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from octavo_shared.errors import MalformedMessageError

M = TypeVar("M")


def decode(deserialize: Callable[[bytes], M], content: bytes) -> M:
    """Return a message. Raises MalformedMessageError: the bytes are none."""
    try:
        return deserialize(content)
    except DecodeError as error:
        raise MalformedMessageError from error


class CheckedAnswers:
    """A channel for a stub that reports malformed answers; gRPC itself logs a traceback, and gives None.

    A call with one answer then raises. On a stream, the message is a `MalformedMessageError`, for its reader to raise.

    Args:
        peer: The peer's name: "the executor".
        kind: The error class to raise, with a sentence.
    """

    def __init__(self, channel: Any, peer: str, kind: Callable[[str], Exception]) -> None:
        self._channel = channel
        self._peer = peer
        self._kind = kind

    def unary_unary(self, method: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
        """Return what calls a method."""
        calling = self._channel.unary_unary(method, response_deserializer=_telling(response_deserializer), **options)
        return self._checked(method, calling)

    def stream_unary(self, method: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
        """Return what calls a method."""
        calling = self._channel.stream_unary(method, response_deserializer=_telling(response_deserializer), **options)
        return self._checked(method, calling)

    def _checked(self, method: str, calling: Callable[..., Any]) -> Any:
        async def call(*arguments: Any, **keywords: Any) -> Any:
            answer = await calling(*arguments, **keywords)
            if isinstance(answer, MalformedMessageError):
                raise self._kind(
                    f"{self._peer} answered {method.rpartition('/')[2]} with a message that cannot be decoded"
                )
            return answer

        return call

    def unary_stream(self, method: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
        """Return what calls a method."""
        return self._channel.unary_stream(method, response_deserializer=_telling(response_deserializer), **options)

    def stream_stream(self, method: str, *, response_deserializer: Callable[[bytes], Any], **options: Any) -> Any:
        """Return what calls a method."""
        return self._channel.stream_stream(method, response_deserializer=_telling(response_deserializer), **options)


def _telling(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def told(content: bytes) -> Any:
        try:
            return decode(deserialize, content)
        except MalformedMessageError as error:
            return error

    return told

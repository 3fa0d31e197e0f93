"""A rare thing: its name, a sentence for people, and how it is seen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rare(Generic[T]):
    """A rare thing.

    Attributes:
        name: What is counted.
        sentence: What has happened then.
        is_seen: Whether it shows in something that happened.
    """

    name: str
    sentence: str
    is_seen: Callable[[T], bool]

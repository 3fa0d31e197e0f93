"""What executors may be able to do beyond wire version 1. Pure; docs/execution-wire.md has each, field by field."""

from collections.abc import Iterable
from enum import IntEnum


class Capability(IntEnum):
    """The enum of the same name in protos/octavo/execution/v1/capability.proto; its numbers are below 64."""

    NUMERICS = 1
    NAMED_BLOCKS = 2
    VARIABLE_TOKENS = 3
    GRAMMARS = 4
    ADAPTERS = 5
    ENCODER = 6
    WEIGHT_VERSIONS = 7
    BLOCK_TRANSFER = 8
    ROW_FLAGS = 9
    POOLING = 10
    CACHE_GROUPS = 11
    GRAMMARS_READY = 13


_NAMES = {int(capability): capability.name for capability in Capability}


def common(wanted: Iterable[int], offered: Iterable[Capability]) -> frozenset[Capability]:
    """Return the capabilities that both sides have; numbers of later releases are ignored."""
    return frozenset(offered).intersection(wanted)


def name_of(number: int) -> str:
    """Return a capability in words; a capability of a later release is its number."""
    return _NAMES.get(number, str(number))


def names_of(numbers: Iterable[int]) -> str:
    """Return capabilities in words, joined by commas; at most 64 of them, whatever a peer sends."""
    return ",".join(name_of(number) for number in sorted(numbers)[:64])

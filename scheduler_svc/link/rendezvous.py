"""At which engine of a cell a request runs: the same one on every front, unless that engine has too much to do.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam: arXiv 1608.01350), by rendezvous hashing
(Thaler, Ravishankar, 1998): an engine that comes or goes changes the place of its share of the prompts only.
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol, TypeVar

from scheduler_svc.request.engine_request import EngineRequest

# What an engine may have to do at most, as a multiple of its share by its slots, as a front sees it. Fronts hear late
# of each other's requests, so an engine may really have up to 1.25 times its share.
LOAD_BOUND = 1.1

# Tokens of a prompt that decide where it goes, in whole blocks: as a rule the beginning of a system prompt.
NUM_PREFIX_TOKENS = 64


class Place(Protocol):
    """An engine process where requests can run."""

    @property
    def scheduler_id(self) -> str:
        """Its name, which stays over its restarts."""

    @property
    def num_slots(self) -> int:
        """Sequences that run there at once."""

    @property
    def num_taken(self) -> int:
        """Sequences that run or wait there."""


_Place = TypeVar("_Place", bound=Place)


def prefix_of(request: EngineRequest, block_size_tokens: int) -> bytes:
    """Return what requests have in common that should run at one place, as they can share blocks there."""
    num_tokens = min(NUM_PREFIX_TOKENS, len(request.prompt_token_ids))
    num_tokens -= num_tokens % block_size_tokens if num_tokens > block_size_tokens else 0
    prompt = request.prompt_token_ids[:num_tokens].astype("<i4", copy=False).tobytes()
    return b"%d:%s:%d:%s" % (len(request.tenant), request.tenant.encode(), request.cache_salt, prompt)


def choose_place(prefix: bytes, width: int, places: Sequence[_Place]) -> _Place:
    """Return where `width` sequences with a prompt of this prefix run.

    The first place by its hash that stays within the bound, and has free slots if any place has; else the least loaded.
    """
    ranked = sorted(places, key=lambda place: _score(place.scheduler_id, prefix), reverse=True)
    num_taken = width + sum(place.num_taken for place in ranked)
    num_slots = max(1, sum(place.num_slots for place in ranked))
    free = [place for place in ranked if place.num_taken + width <= place.num_slots] or ranked
    for place in free:
        if place.num_taken + width <= max(width, LOAD_BOUND * num_taken * place.num_slots / num_slots):
            return place
    return min(free, key=lambda place: (place.num_taken + width) / max(1, place.num_slots))


def _score(scheduler_id: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(prefix, digest_size=8, key=hashlib.sha256(scheduler_id.encode()).digest()).digest()

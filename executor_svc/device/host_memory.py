"""How much memory this machine has, and this container. Imports no torch: commands ask too."""

from contextlib import suppress
from pathlib import Path

from executor_svc.device.cgroups import control_groups, read_text

# What a group uses and the system takes back before it ends a process: the cache of files.
_CACHES = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")

# A CPU's memory is shared with everything else that runs on the machine.
CACHE_SHARE = 0.25
LARGEST_SHARE_OF_FREE = 0.5
# Of what is free beside the weights, where --max-num-seqs is not set.
STATES_SHARE = 0.25
# Of a KV cache, where --state-cache-gib is not set: one part of so many is for saved states.
PARTS_OF_CACHE = 4


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that new work can take without swapping, as Linux estimates it; None elsewhere.

    Args:
        root: Of the system's files.
    """
    free = _memory_bytes("MemAvailable", root)
    if free is None:
        return None
    return min([free, *filter(None, map(_free_in, control_groups(root, "memory")))])


def cache_share_bytes(available: int, total: int) -> int:
    """Return what a KV cache takes of a machine: a share of all, halved until it is at most a share of what is free."""
    share = int(total * CACHE_SHARE)
    while share > available * LARGEST_SHARE_OF_FREE:
        share //= 2
    return share


def states_that_fit(state_bytes: int, available: int, most: int) -> int:
    """Return how many sequences have room for their recurrent states in a share of what is free, from 1 to `most`."""
    return max(1, min(most, int(available * STATES_SHARE) // state_bytes))


def saved_states_in(cache_bytes: int, block_bytes: int, state_bytes: int, state_cache_gib: float | None) -> int:
    """Return how many saved states a KV cache of so many bytes has beside its blocks.

    Args:
        cache_bytes: Of blocks and saved states together.
        block_bytes: Of a block of all layers that attend.
        state_bytes: Of a state of all layers that have one; 0: none has.
        state_cache_gib: The setting; None: a quarter of the cache, and no more states than blocks.
    """
    if not state_bytes:
        return 0
    if state_cache_gib is not None:
        return int(state_cache_gib * 2**30) // state_bytes
    return max(0, min(cache_bytes // PARTS_OF_CACHE // state_bytes, cache_bytes // (block_bytes + state_bytes)))


def cache_bytes_for(num_blocks: int, block_bytes: int, state_bytes: int, state_cache_gib: float | None) -> int:
    """Return the size of a KV cache that has so many blocks beside its saved states; see `saved_states_in`."""
    of_blocks = num_blocks * block_bytes
    if state_bytes and state_cache_gib is not None:
        return of_blocks + int(state_cache_gib * 2**30)
    return min(-(-of_blocks * PARTS_OF_CACHE // (PARTS_OF_CACHE - 1)), num_blocks * (block_bytes + state_bytes))


def total_memory_bytes() -> int | None:
    """Return the memory of this machine, on Linux; None elsewhere."""
    return _memory_bytes("MemTotal", Path("/"))


def _free_in(group: Path) -> int | None:
    """Return what a control group may take yet, at least 1; None: it has no limit."""
    names = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for limit, used in names:
        with suppress(ValueError):  # "max", or no such files
            free = int(read_text(group / limit)) - int(read_text(group / used))
            lines = [line.split() for line in read_text(group / "memory.stat").splitlines()]
            sizes = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            # Version 1 has both for the group alone and, with `total`, for the groups inside it too.
            cached = [sizes.get(name, 0) for name in _CACHES]
            return max(1, free + max(sum(cached[:2]), sum(cached[2:])))
    return None


def _memory_bytes(name: str, root: Path) -> int | None:
    sizes_kib = [
        int(line.split()[1]) for line in read_text(root / "proc/meminfo").splitlines() if line.startswith(f"{name}:")
    ]
    return sizes_kib[0] * 1024 if sizes_kib else None

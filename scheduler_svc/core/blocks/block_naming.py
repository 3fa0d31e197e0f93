"""What the names of a fleet's blocks stand for beside tokens and salt: the weights, and the last reset.

The key of all names is made of them. So after a change nobody finds an older block, on any executor, on the host or on
the way, though each stays where it is until its place is needed. The first weights of a scheduler have the scheduler's
key as it is: after a restart it finds their blocks again, and so does one of an older release. Executors forget names
when their weights change, so these blocks are of no others. Pure.
"""

from hashlib import blake2b


class BlockNaming:
    """Makes the keys of names.

    Attributes:
        weights_digest: Of the weights that compute blocks; empty: it is not known.
        first_digest: The first one that was.
        num_resets: How often cached blocks were given up.
        era: How often the key has changed: an era has one key. Weights that come back have theirs again.
    """

    def __init__(self) -> None:
        self.weights_digest = self.first_digest = ""
        self.num_resets = 0
        self.era = 0

    def follow(self, weights_digest: str) -> None:
        """Let names stand for blocks of these weights."""
        if weights_digest != self.weights_digest:
            self.first_digest = self.first_digest or weights_digest
            self.weights_digest = weights_digest
            self.era += 1

    def reset(self) -> None:
        """Let no block be found that has a name."""
        self.num_resets += 1
        self.era += 1

    def key(self, prefix_key: bytes) -> bytes:
        """Return the key of names in this era; `prefix_key`: the scheduler's secret."""
        is_first = self.weights_digest == self.first_digest and not self.num_resets
        return prefix_key if is_first else blake2b(self._parts, key=prefix_key).digest()

    @property
    def key_number(self) -> int:
        """What stands for the key where no secret may be: eras with one key have the same, of 64 bits."""
        return int.from_bytes(blake2b(self._parts, digest_size=8).digest(), "little")

    @property
    def _parts(self) -> bytes:
        return f"{self.weights_digest} {self.num_resets}".encode()

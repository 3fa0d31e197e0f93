"""The secret key of the names of cached blocks (`core/blocks/prefix_cache.py`), over the life of a scheduler.

An engine with the key of the engine before it finds the blocks that executors kept. Tenants never see key or names.
"""

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.exposure import warn_if_others_can_read
from scheduler_svc.config.scheduler_config import SchedulerConfig
from scheduler_svc.engine.surroundings import PREFIX_KEY_BYTES

# As the wire has it.
FINGERPRINT_BYTES = 16


class PrefixKeyError(OctavoServiceError):
    """The file of the key cannot be used; the message names it and the fix."""


def prefix_key(config: SchedulerConfig) -> bytes:
    """Return the key: of the file that is configured, or a new one. Raises PrefixKeyError: the file cannot be used."""
    path = config.prefix_key_file
    if path is None:
        return secrets.token_bytes(PREFIX_KEY_BYTES)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PrefixKeyError(
            f"--prefix-key-file {path} cannot be read ({error.strerror}); give a file that this process may read"
        ) from error
    warn_if_others_can_read("--prefix-key-file", path)
    if len(content) < PREFIX_KEY_BYTES:
        raise PrefixKeyError(
            f"--prefix-key-file {path} has {len(content)} bytes; write at least {PREFIX_KEY_BYTES} random ones "
            f"(head -c {PREFIX_KEY_BYTES} /dev/urandom)"
        )
    return blake2b(content, digest_size=PREFIX_KEY_BYTES).digest()


def write_prefix_key(path: Path) -> None:
    """Write a new key to a file that other users cannot read."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(secrets.token_bytes(PREFIX_KEY_BYTES))


def key_fingerprint(key: bytes) -> bytes:
    """Return a fingerprint that shows executors whether names were made with the same key, and nothing of the key."""
    return blake2b(b"fingerprint of the names of blocks", key=key, digest_size=FINGERPRINT_BYTES).digest()

"""What REVISION of the numerics id stands for, on record: configurations of all families, and the bits of the probe.

`python -m tests.numerics.record_numerics` writes it anew, in `recorded_numerics.json`. When to raise REVISION first is
in `executor_svc/numerics/identity.py`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from executor_svc.attention.cache_format import CACHE_DTYPES
from executor_svc.models.families import parse_config
from executor_svc.native.library import NativeLibrary
from executor_svc.numerics.identity import REVISION, probe_native
from tests.numerics.architectures import SIZES
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import LANES, SETTINGS, native_library

CACHES = {f"none, cache {name}": {"cache_dtype": dtype} for name, dtype in CACHE_DTYPES.items() if name != "float32"}
RECORD = Path(__file__).with_name("recorded_numerics.json")


def current() -> dict[str, Any]:
    """Return what this tree computes on this machine."""
    libraries = {library.instructions: library for library in map(native_library, LANES)}
    return {
        "revision": REVISION,
        "configurations": {name: _configuration(name) for name in sorted(FAMILY_ARCHITECTURES)},
        "probe": {key: bits for _, library in sorted(libraries.items()) for key, bits in probe_of(library).items()},
    }


def probe_of(library: NativeLibrary) -> dict[str, str]:
    """Return the bits that a library computes, in all formats."""
    formats = {**SETTINGS, **CACHES}
    return {f"{library.instructions} {name}": probe_native(library.path, **each) for name, each in formats.items()}


def recorded() -> dict[str, Any]:
    """Return what is on record."""
    record: dict[str, Any] = json.loads(RECORD.read_text())
    return record


def _configuration(architecture: str) -> str:
    """Return a digest of everything that a family reads of its config.json."""
    values = {**SIZES, **FAMILY_ARCHITECTURES[architecture], "architectures": [architecture]}
    return hashlib.sha256(repr(parse_config(values, Path("config.json"))).encode()).hexdigest()


if __name__ == "__main__":
    RECORD.write_text(json.dumps(current(), indent=2) + "\n")

"""What a compiled library computes with: its machine code and its constants, and nothing else of the file.

The file has more: the name and version of the compiler, symbols, notes. A build by another compiler that gives the same
code counts as the same library here, as do sources that differ in comments only.
"""

import hashlib
import struct
from pathlib import Path

# In an ELF file of 64 bits: where the table of sections is, how large an entry is, how many there are, and which
# entry has the names. Of an entry: name, offset and size.
_HEADER = struct.Struct("<40xQ10xHHH")
_SECTION = struct.Struct("<I20xQQ24x")

_PARTS = (".text", ".rodata", ".data")


def code_digest(library: Path) -> str:
    """Return the SHA-256 of the code and the constants of a library, 64 hexadecimal digits."""
    content = library.read_bytes()
    hasher = hashlib.sha256()
    for name, (begin, size) in sorted(_sections(content).items()):
        if name in _PARTS or name.startswith(tuple(f"{part}." for part in _PARTS)):
            hasher.update(f"{name} {size}\n".encode() + content[begin : begin + size])
    return hasher.hexdigest()


def _sections(content: bytes) -> dict[str, tuple[int, int]]:
    """Return where each section begins, and its size."""
    table, entry_bytes, count, index_of_names = _HEADER.unpack_from(content)
    entries = [_SECTION.unpack_from(content, table + index * entry_bytes) for index in range(count)]
    _, names, _ = entries[index_of_names]
    return {
        content[names + name : content.index(b"\0", names + name)].decode(): (begin, size)
        for name, begin, size in entries
    }

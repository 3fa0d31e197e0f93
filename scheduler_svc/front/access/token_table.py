"""The tokens of clients: a file with one `TENANT TOKEN` a line, as a table that tells nothing by its timing."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from pathlib import Path

from octavo_shared.errors import OctavoServiceError
from octavo_shared.grpc.exposure import warn_if_others_can_read
from scheduler_svc.front.access.identity import Identity
from scheduler_svc.request.engine_request import MAX_TENANT_LENGTH

MIN_TOKEN_CHARS = 16

# Stands for all tenants.
ANY_TENANT = "*"


class TokensFileError(OctavoServiceError):
    """The file of tokens cannot be used; the message names the line and never a token."""


class TokenTable:
    """Finds the identity that belongs to a token. Tokens are kept as digests.

    Args:
        entries: Pairs of tenant and token.
    """

    def __init__(self, entries: Sequence[tuple[str, str]]) -> None:
        self._entries = [
            (_digest(token), Identity(tenant=None if tenant == ANY_TENANT else tenant)) for tenant, token in entries
        ]

    def find(self, token: str) -> Identity | None:
        """Return the identity that belongs to a token; None: the token is unknown.

        Every entry is compared, each in constant time, so the time says nothing about any token.
        """
        digest, found = _digest(token), None
        for own, identity in self._entries:
            if hmac.compare_digest(own, digest):
                found = identity
        return found


def read_tokens(path: Path) -> TokenTable:
    """Read a file of tokens: `TENANT TOKEN` a line, `#` begins a comment line, tenant `*` stands for all.

    Raises: TokensFileError: it is unreadable, a line is wrong, or there is no token.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise TokensFileError(
            f"--tokens-file {path} cannot be read ({error.strerror}); give a file that this process may read"
        ) from error
    except UnicodeDecodeError as error:
        raise TokensFileError(f"--tokens-file {path} is not UTF-8 text; write one TENANT TOKEN per line") from error
    warn_if_others_can_read("--tokens-file", path)
    entries: list[tuple[str, str]] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        tenant, token = _entry(line, f"--tokens-file {path}, line {number}")
        if token in line_of:
            raise TokensFileError(
                f"--tokens-file {path}, line {number}: the token is the same as on line {line_of[token]}; give each "
                "tenant its own"
            )
        line_of[token] = number
        entries.append((tenant, token))
    if not entries:
        raise TokensFileError(
            f"--tokens-file {path} contains no token, so no client could call; write one TENANT TOKEN per line"
        )
    return TokenTable(entries)


def _entry(line: str, place: str) -> tuple[str, str]:
    words = line.split()
    if len(words) != 2:
        raise TokensFileError(f"{place}: {len(words)} words; write TENANT TOKEN")
    tenant, token = words
    if len(tenant) > MAX_TENANT_LENGTH:
        raise TokensFileError(f"{place}: the tenant is {len(tenant)} characters long; use at most {MAX_TENANT_LENGTH}")
    if len(token) < MIN_TOKEN_CHARS:
        raise TokensFileError(
            f"{place}: the token is {len(token)} characters long; use at least {MIN_TOKEN_CHARS} "
            '("openssl rand -hex 32" generates one)'
        )
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise TokensFileError(f"{place}: the token contains non-ASCII characters, which clients cannot send")
    return tenant, token


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()

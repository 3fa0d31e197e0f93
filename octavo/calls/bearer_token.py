"""The token that says to a scheduler who calls."""

import re
from pathlib import Path

from octavo.errors import ConnectionOptionsError
from octavo.values.address import is_loopback


def token_metadata(address: str, token: str, *, is_encrypted: bool) -> tuple[tuple[str, str], ...]:
    """Return what carries a token in each call to HOST:PORT.

    Raises: ConnectionOptionsError: others could read it on its way, or it is no token.
    """
    if not is_encrypted and not is_loopback(address):
        raise ConnectionOptionsError(
            f"the token would be sent to {address} in plaintext; use TLS (--tls-ca or --tls), or send no token"
        )
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ConnectionOptionsError("the token must be one word of ASCII characters, without spaces")
    return (("authorization", f"Bearer {token}"),)


def read_token(path: Path) -> str:
    """Return the token in a file, without the white space around it.

    Raises: ConnectionOptionsError: the file cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConnectionOptionsError(f"--token-file {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConnectionOptionsError(f"--token-file {path} is not a text file with a token") from error

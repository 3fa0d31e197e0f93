"""The options that say which scheduler a command talks to, and how: address, TLS, token."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from octavo.admin_client import AdminClient
from octavo.calls.scheduler_channel import read_token
from octavo.calls.tls import TlsOptions
from octavo.client import DEFAULT_ADMIN_ADDRESS, Client
from octavo.commands.options import address_option, check_address, is_on_command_line, with_options

_R = TypeVar("_R")

_FILE = click.Path(path_type=Path)

_admin_address_option = click.option(
    "--address",
    callback=check_address,
    default=DEFAULT_ADMIN_ADDRESS,
    show_default=True,
    envvar="OCTAVO_ADMIN_ADDRESS",
    metavar="HOST:PORT",
    help="Address of the scheduler's admin port. [OCTAVO_ADMIN_ADDRESS]",
)

_SECURITY_OPTIONS = {
    "speaks_tls": click.option(
        "--tls",
        "speaks_tls",
        is_flag=True,
        envvar="OCTAVO_TLS",
        help="Use TLS, and trust the certificate authorities of this system. [OCTAVO_TLS]",
    ),
    "tls_ca": click.option(
        "--tls-ca",
        type=_FILE,
        envvar="OCTAVO_TLS_CA",
        metavar="FILE",
        help="Use TLS, and trust the certificate authorities in this PEM file. [OCTAVO_TLS_CA]",
    ),
    "tls_cert": click.option(
        "--tls-cert",
        type=_FILE,
        envvar="OCTAVO_TLS_CERT",
        metavar="FILE",
        help="Your client certificate (PEM), if the scheduler asks for one. [OCTAVO_TLS_CERT]",
    ),
    "tls_key": click.option(
        "--tls-key",
        type=_FILE,
        envvar="OCTAVO_TLS_KEY",
        metavar="FILE",
        help="Private key of --tls-cert (PEM). [OCTAVO_TLS_KEY]",
    ),
    "tls_server_name": click.option(
        "--tls-server-name",
        envvar="OCTAVO_TLS_SERVER_NAME",
        metavar="NAME",
        help="Name in the scheduler's certificate, if it differs from --address. [OCTAVO_TLS_SERVER_NAME]",
    ),
    "token": click.option(
        "--token",
        envvar="OCTAVO_TOKEN",
        metavar="TOKEN",
        help="Your token, if the scheduler asks for one. Others on this machine can see it: use --token-file or "
        "OCTAVO_TOKEN instead.",
    ),
    "token_file": click.option(
        "--token-file",
        type=_FILE,
        envvar="OCTAVO_TOKEN_FILE",
        metavar="FILE",
        help="File that holds your token. [OCTAVO_TOKEN_FILE]",
    ),
}


_model_option = click.option(
    "--model",
    default="",
    metavar="MODEL",
    help="Name of the model, if the server has several.  [default: the only one]",
)


def _chosen_token(token: str | None, token_file: Path | None) -> str | None:
    """Return the token; of a flag and a variable the flag counts."""
    context = click.get_current_context()
    if token is not None and token_file is not None:
        given = [name for name in ("token", "token_file") if is_on_command_line(context, name)]
        if len(given) != 1:
            raise click.UsageError("give the token by --token or by --token-file", context)
        return token if given == ["token"] else read_token(token_file)
    return token if token_file is None else read_token(token_file)


def connection_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags of a connection; it gets a Client that is not open yet, as `client`."""
    return with_options(_model_option)(_with_connection(command, Client, address_option))


def admin_connection_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags of a connection to the admin port; it gets an AdminClient that is not open yet."""
    return _with_connection(command, AdminClient, _admin_address_option)


def http_options(command: Callable[..., _R]) -> Callable[..., _R]:
    """Give a command the flags of a connection over HTTP, whose URL says the rest; it gets `tls` and `token`."""
    names = ("tls_ca", "tls_cert", "tls_key", "token", "token_file")

    @functools.wraps(command)
    def with_http(
        *args: Any,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        token: str | None,
        token_file: Path | None,
        **others: Any,
    ) -> _R:
        tls = TlsOptions(tls_ca, tls_cert, tls_key)
        return command(*args, tls=tls, token=_chosen_token(token, token_file), **others)

    return with_options(*(_SECURITY_OPTIONS[name] for name in names))(with_http)


def _with_connection(
    command: Callable[..., _R],
    client_type: type[Client] | type[AdminClient],
    address_option: Callable[[Callable[..., _R]], Callable[..., _R]],
) -> Callable[..., _R]:
    @functools.wraps(command)
    def with_client(
        *args: Any,
        address: Any,  # HOST:PORT, or several for a Client
        speaks_tls: bool,
        tls_ca: Path | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        tls_server_name: str | None,
        token: str | None,
        token_file: Path | None,
        model: str = "",  # of a Client
        **others: Any,
    ) -> _R:
        tls = TlsOptions(tls_ca, tls_cert, tls_key, tls_server_name)
        if not (speaks_tls or tls_ca) and tls != TlsOptions():
            raise click.UsageError(
                "--tls-cert, --tls-key and --tls-server-name need --tls-ca or --tls", click.get_current_context()
            )
        token = _chosen_token(token, token_file)
        options: dict[str, Any] = {"model": model} if model else {}
        client = client_type(address, tls=tls if speaks_tls or tls_ca else None, token=token, **options)
        return command(*args, client=client, **others)

    return with_options(address_option, *_SECURITY_OPTIONS.values())(with_client)

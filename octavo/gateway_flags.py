"""The flags of `python -m octavo.gateway`: its own, and those that it passes on to `smg launch`."""

import argparse
import contextlib
import io
from collections.abc import Sequence
from typing import NoReturn

import octavo


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, as the other programs do."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f'octavo gateway: {message}; see "{self.prog} --help"\n')


def gateway_parser(default_listen: str) -> argparse.ArgumentParser:
    """Return the parser; what it does not know is for SMG. `default_listen` is the HOST:PORT of the API."""
    parser = _OneLineParser(
        prog="python -m octavo.gateway",
        description="Serve OpenAI's API for a scheduler. All other flags go to `smg launch`.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {octavo.__version__}")
    parser.add_argument(
        "--listen",
        default=default_listen,
        metavar="HOST:PORT",
        help="address of the API; port 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument("--scheduler", required=True, metavar="HOST:PORT", help="a scheduler with --vllm-engine")
    parser.add_argument("--exit-on-stdin-close", action="store_true", help="end when standard input closes")
    return parser


def smg_refusal(arguments: Sequence[str]) -> str | None:
    """Return what SMG has against arguments, in its own words; None: nothing."""
    from smg.launch_router import parse_router_args

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse_router_args(list(arguments))
    except SystemExit:
        last_line = (said.getvalue().strip() or "smg refuses its arguments").splitlines()[-1]
        return last_line.partition("error: ")[2] or last_line
    return None

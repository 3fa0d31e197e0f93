"""What commands need beside what every installation has: an extra with the command's name."""

import importlib.util

import click

from octavo.values.wording import how_to_install


def check_packages(command: str, *names: str) -> None:
    """Refuse to begin without packages of a command's extra.

    Raises:
        click.ClickException: one is missing; with the command that installs it.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        needed = " and ".join(missing)
        raise click.ClickException(f"octavo {command} needs {needed}: {how_to_install(command)}")

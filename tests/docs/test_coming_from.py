"""The names of Octavo in docs/coming-from.md exist, and most are there."""

import re
from dataclasses import fields

import click

from octavo import SamplingParams
from octavo.commands.command_line import cli
from octavo.values.sampling_params_table import SAMPLING_PARAMS
from tests.docs.flags import SERVICES
from tests.docs.pages import REPOSITORY
from tests.support.each_row import each_row

PAGE = (REPOSITORY / "docs" / "coming-from.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[tuple[str, str]]:
    """Return the first two cells of the rows below a heading: theirs and ours."""
    section = re.split(r"^#+ ", PAGE.partition(f" {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    return [(theirs.strip(), ours.strip()) for theirs, ours in lines[1:]]


def known_flags() -> set[str]:
    services = {name for config in SERVICES.values() for name in config.model_fields}
    flags = {f"--{prefix}{name.replace('_', '-')}" for name in services for prefix in ("", "no-")}
    with click.Context(cli) as context:
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            assert command is not None
            flags |= {option for parameter in command.params for option in parameter.opts}
    return flags


def test_flags_of_ours_exist() -> None:
    tables = [rows(heading) for heading in ("Flags of `vllm serve`", "Commands", "Parameters", "Environment")]
    named = {flag for table in tables for _, ours in table for flag in re.findall(r"`(--[a-z-]+)", ours)}
    assert "--max-model-len" in named
    assert named - known_flags() == set()


@each_row("`SamplingParams`", "Parameters", "From transformers")
def test_sampling_params_of_ours_exist(heading: str) -> None:
    known = {field.name for field in fields(SamplingParams)}
    for theirs, ours in rows(heading):
        names = re.findall(r"`([a-z_]+)`", theirs if ours == "the same" else ours)
        assert set(names) <= known | {"dtype", "device"}, theirs


def test_every_sampling_parameter_of_ours_is_told() -> None:
    public = {parameter.name for parameter in SAMPLING_PARAMS if parameter.is_public}
    assert {name for name in public if f"`{name}`" not in PAGE} == set()

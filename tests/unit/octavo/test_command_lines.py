"""What holds for every command: its help, its flags, and one line for whatever is wrong with a command line."""

from collections import defaultdict
from collections.abc import Iterator

import click
import pytest

from octavo.commands.command_line import cli, run
from tests.support.each_row import each_row


def walk(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield every command that is no group, with the words that call it."""
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                subcommand = command.get_command(context, name)
                assert subcommand is not None
                yield from walk(subcommand, (*words, name))
    else:
        yield " ".join(words), command


COMMANDS = dict(walk(cli))
OPTIONS = {
    (name, "/".join(option.opts)): option
    for name, command in COMMANDS.items()
    for option in command.params
    if isinstance(option, click.Option)
}
# `octavo list` only says which model is served, if one is.
OF_A_SCHEDULER = [name for name, flag in OPTIONS if flag == "--address" and name != "list"]

# Enough to fill the arguments of a command, where it has some.
ARGUMENTS = {
    "embed": ["/proc/version"],  # a line of text
    "completion": ["bash"],
    "explain": ["request"],
    "model path": ["smollm2"],
    "model prepare": ["smollm2"],
}


def arguments_of(name: str) -> list[str]:
    num_required = sum(isinstance(param, click.Argument) and param.required for param in COMMANDS[name].params)
    return ARGUMENTS.get(name, ["word"] * num_required)


def one_line(captured: str) -> str:
    """Return what is told besides warnings, which must be one line."""
    lines = [line for line in captured.splitlines() if not line.startswith("octavo: warning: ")]
    assert len(lines) == 1
    assert lines[0].startswith("octavo: ")
    return lines[0]


def test_all_commands_are_looked_at() -> None:
    assert {"chat", "completion", "demo", "generate", "list", "model path", "pull", "up"} <= COMMANDS.keys()
    assert {"chat", "generate"} <= set(OF_A_SCHEDULER)


@each_row(*COMMANDS)
def test_help_says_what_the_command_does_and_what_each_flag_is(name: str) -> None:
    command = COMMANDS[name]
    assert command.get_short_help_str()
    without_help = [
        option.opts
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not option.help
    ]
    assert without_help == []


@each_row(*OPTIONS)
def test_help_names_the_variable_of_a_flag(name: str, flag: str) -> None:
    option = OPTIONS[name, flag]
    assert isinstance(option.envvar, str | None)
    assert option.envvar is None or option.envvar in (option.help or "")
    assert option.show_envvar is False  # click's own way to show it looks otherwise


def test_a_flag_of_several_commands_takes_the_same_and_is_said_the_same_way() -> None:
    said: dict[str, set[tuple[object, ...]]] = defaultdict(set)
    for (name, flag), option in OPTIONS.items():
        if name == "bench" and option.envvar is None:  # what it sends is its own, and not only to a scheduler
            continue
        with click.Context(cli) as context:
            metavar = option.make_metavar(context)
        # Which port, of what, which model of what, whose.
        is_said_by_command = flag in {"--address", "--interval", "--json", "--model", "--tenant"}
        said[flag].add((metavar, None) if is_said_by_command else (metavar, option.envvar, option.help, option.default))
    assert {flag: ways for flag, ways in said.items() if len(ways) > 1} == {}


@each_row(*COMMANDS)
def test_a_wrong_flag_is_one_line(name: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), *arguments_of(name), "--xyzzy"]) == 2
    sentence = one_line(capsys.readouterr().err)
    assert "No such option '--xyzzy'" in sentence
    assert sentence.endswith(f'; see "octavo {name} --help"')


@each_row(*COMMANDS)
def test_a_word_too_many_is_one_line(name: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    num_taken = sum(isinstance(param, click.Argument) for param in COMMANDS[name].params)
    words = (ARGUMENTS.get(name) or ["word"] * num_taken) + ["more"]
    if any(param.nargs == -1 for param in COMMANDS[name].params):
        words = ["--xyzzy"]
    assert run([*name.split(), *words]) == 2
    one_line(capsys.readouterr().err)


@each_row(*[name for name in COMMANDS if arguments_of(name)])
def test_a_missing_argument_is_one_line(name: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name.split()) == 2
    assert f'see "octavo {name} --help"' in one_line(capsys.readouterr().err)


WRONG_VALUES = {
    click.types.IntParamType: "1.5",
    click.types.FloatParamType: "much",
    click.IntRange: "1.5",
    click.FloatRange: "much",
    click.Choice: "other",
}


@each_row(*[key for key, option in OPTIONS.items() if type(option.type) in WRONG_VALUES and not option.is_flag])
def test_a_wrong_value_is_one_line_that_names_flag_and_value(
    name: str, flag: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    value = WRONG_VALUES[type(OPTIONS[name, flag].type)]
    last_flag = flag.split("/")[-1]
    assert run([*name.split(), *arguments_of(name), last_flag, value]) == 2
    sentence = one_line(capsys.readouterr().err)
    assert last_flag in sentence
    assert value in sentence


@each_row(
    *(
        (*row, address)
        for row in [key for key, option in OPTIONS.items() if option.metavar == "HOST:PORT"]
        for address in ["localhost", "localhost:", "localhost:65536", ":50051", "localhost:http"]
    )
)
def test_what_is_no_address_is_one_line(
    name: str, flag: str, address: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*name.split(), *arguments_of(name), flag, address]) == 2
    assert f"{address!r} is not HOST:PORT with a port from" in one_line(capsys.readouterr().err)


@each_row(*OF_A_SCHEDULER)
def test_a_dead_address_is_one_line_with_the_remedy(name: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*name.split(), *arguments_of(name), "--address", "127.0.0.1:1"]) == 1
    assert one_line(capsys.readouterr().err) == (
        'octavo: no scheduler is reachable at 127.0.0.1:1; start one with "octavo up"'
    )


@each_row(
    ("genrate", "octavo: No such command 'genrate'. Did you mean 'generate'? See \"octavo --help\""),
    ("zzz", "octavo: No such command 'zzz'; see \"octavo --help\""),
    ("--versio", "octavo: No such option '--versio'. Did you mean '--version'? See \"octavo --help\""),
)
def test_what_there_is_not_is_met_with_the_nearest(
    words: str, sentence: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([words]) == 2
    assert one_line(capsys.readouterr().err) == sentence


def test_a_group_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["model"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Usage: octavo model" in captured.out

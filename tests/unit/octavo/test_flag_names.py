import click
import pytest

from octavo.commands.chat import chat
from octavo.commands.command_line import cli, run
from octavo.commands.flag_names import _FLAGS_ELSEWHERE, in_flags
from octavo.commands.generate import generate
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn
from tests.unit.octavo.test_cli import run as run_with


@each_row(
    ("sampling_params.top_p is 2; it must be at most 1", "--top-p is 2; it must be at most 1"),
    ("sampling_params.banned_words is ['a']; it must be short", "--ban is ['a']; it must be short"),
    ("sampling_params.n is 3; it must be from 1 to 2 (beam_width)", "--n is 3; it must be from 1 to 2 (--beam-width)"),
    ("tenant is 'red'; it must be one of blue", "--tenant is 'red'; it must be one of blue"),
    ("cache_salt is 'x'; it must be short", "--cache-salt is 'x'; it must be short"),
    ("prompt is empty; it must be at least 1 token long", "prompt is empty; it must be at least 1 token long"),
    ("messages is 61 tokens long; it must be short", "the prompt is 61 tokens long; it must be short"),
    ("text is 9 characters long; it must be short", "the prompt is 9 characters long; it must be short"),
    ("encoder_prompt.text is 61 tokens; it must be short", "--encoder-prompt is 61 tokens; it must be short"),
    ("messages is set; it must be unset", "messages is set; it must be unset"),
    ("it is too long (max_model_len is 64); stop it", "it is too long (max_model_len is 64); stop it"),
    ("sampling_params.grammar.json_schema is []; it must be a JSON", "--json-schema is []; it must be a JSON"),
    ("sampling_params.grammar.regex is [; it must be one", "--regex is [; it must be one"),
    ("sampling_params.grammar.lark is x; it must be one", "--grammar is x; it must be one"),
)
def test_a_field_is_called_by_the_flag_that_sets_it(said: str, shown: str) -> None:
    assert in_flags(said, click.Context(generate)) == shown


def test_a_flag_that_a_command_does_not_have_is_not_named() -> None:
    assert in_flags("sampling_params.n is 0", click.Context(chat)) == "sampling_params.n is 0"


async def test_chat_names_its_flags_too_and_goes_on(stand_in: StandIn) -> None:
    stand_in.has_chat_template = True
    ended = await run_with("chat", "--top-k", "-1", "--address", stand_in.address, stdin="Hi\n/quit\n")
    assert ended.status == 1
    assert ended.stderr == "octavo: --top-k is -1; it must be a whole number, from 0 to 2147483647\n"


@each_row(
    ("up --port 9999", "No such option '--port'; in Octavo it is --listen HOST:PORT"),
    ("serve smollm2 --tensor-parallel-size 2", "No such option '--tensor-parallel-size'; in Octavo it is --tp"),
    ("generate hi --num-predict 3", "No such option '--num-predict'; in Octavo it is --max-tokens"),
    ("ps", "No such command 'ps'; in Octavo it is octavo top"),
)
def test_a_name_of_another_server_is_answered_with_the_one_here(
    line: str, said: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    assert said in capsys.readouterr().err


@each_row("up", "demo")
def test_a_flag_that_each_service_has_for_itself_is_answered_with_how_it_is_set(
    command: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--tls-cert", "x"]) == 2
    assert capsys.readouterr().err == (
        "octavo: No such option '--tls-cert': each service has its own; to set the scheduler's, use --set "
        f'scheduler.tls_cert=VALUE; see "octavo {command} --help"\n'
    )


def test_names_of_other_servers_lead_to_flags_that_there_are() -> None:
    [up, asking] = [cli.get_command(click.Context(cli), name) for name in ("up", "generate")]
    assert up is not None
    assert asking is not None
    flags = {flag for command in (up, asking) for param in command.params for flag in param.opts}
    assert {here.partition(" ")[0] for here in _FLAGS_ELSEWHERE.values()} <= flags
    assert not set(_FLAGS_ELSEWHERE) & flags

"""The command line of octavo/cli.py: finds the subcommands and turns every failure into one readable line.

A subcommand is loaded when it is used, so that `octavo --version` does not wait for gRPC. Each is a
module of octavo/commands.
"""

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click
from click.shell_completion import shell_complete

import octavo
from octavo.commands.completion import COMPLETION_VARIABLE
from octavo.commands.flag_names import command_here, flag_here
from octavo.errors import NotConnectedError, OctavoError
from octavo.values.wording import how_to_install, printable

_COMMANDS = {
    "batch": "octavo.commands.batch:batch",
    "bench": "octavo.commands.bench:bench",
    "chat": "octavo.commands.chat:chat",
    "completion": "octavo.commands.completion:completion",
    "demo": "octavo.commands.demo:demo",
    "drain": "octavo.commands.drain:drain",
    "embed": "octavo.commands.embed:embed",
    "explain": "octavo.commands.explain:explain",
    "generate": "octavo.commands.generate:generate",
    "list": "octavo.commands.list:list_models",
    "model": "octavo.models.command:model",
    "pull": "octavo.commands.pull:pull",
    "replay": "octavo.commands.replay:replay",
    "serve": "octavo.commands.up:up",  # the name that other servers have for it
    "top": "octavo.commands.top:top",
    "up": "octavo.commands.up:up",
}

_OURS = ("", "octavo", "octavo_shared", "scheduler_svc", "executor_svc")  # that one lacks a module is a fault

_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class _LateGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module_name, _, attribute = _COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module_name), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the words call; if there is none, name the nearest."""
        if args[0] not in _COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            if here := command_here(args[0]):
                ctx.fail(f"No such command {args[0]!r}; in Octavo it is {here}")
            close = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            ctx.fail(f"No such command {args[0]!r}.{f' Did you mean {close[0]!r}?' if close else ''}")
        return super().resolve_command(ctx, args)


@click.group(cls=_LateGroup, invoke_without_command=True)
@click.option("--debug", is_flag=True, envvar="OCTAVO_DEBUG", help="Show the traceback of an error. [OCTAVO_DEBUG]")
@click.version_option(octavo.__version__, message="octavo %(version)s")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """LLM inference in two tiers: a scheduler without a GPU, and executors that hold the KV cache."""
    del debug  # read by run()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(args: Sequence[str]) -> int:
    """Run a command line and return its exit status."""
    if instruction := os.environ.get(COMPLETION_VARIABLE):  # a shell asks, by the script of `octavo completion`
        return shell_complete(cli, {}, "octavo", COMPLETION_VARIABLE, instruction)
    is_debug = False
    try:
        with cli.make_context("octavo", list(args)) as ctx:
            is_debug = ctx.params["debug"]
            cli.invoke(ctx)
            sys.stdout.flush()
    except click.exceptions.Exit as exit_request:
        return exit_request.exit_code
    except click.exceptions.NoArgsIsHelpError as error:  # `octavo model`, which does as `octavo` alone
        click.echo(error.message)
        return 0
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption) and (here := flag_here(error.option_name)):
            message = f"No such option {error.option_name!r}; in Octavo it is {here}"
        see = " See" if message.endswith("?") else "; see"
        _say(f'{message}{see} "{error.ctx.command_path} --help"' if error.ctx else message)
        return error.exit_code
    except click.ClickException as error:
        _say(error.format_message())
        return error.exit_code
    except BrokenPipeError:
        _leave_closed_stdout()
        return _EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        click.echo(err=True)
        return _EXIT_INTERRUPTED
    except Exception as error:  # the outermost layer: whatever it is, a person reads it
        if is_debug:
            traceback.print_exc()
        _say(_to_sentence(error, next((word for word in args if word in _COMMANDS), "")))
        return _EXIT_FAILURE
    return 0


def _to_sentence(error: Exception, command: str) -> str:
    if isinstance(error, ModuleNotFoundError) and (package := (error.name or "").partition(".")[0]) not in _OURS:
        extras = (command,) if command in ("batch", "bench") else ("scheduler", "executor")
        return f"octavo {command} needs the package {package}: {how_to_install(*extras)}"
    if isinstance(error, NotConnectedError):
        return f'{error}; start one with "octavo up"'
    if isinstance(error, OctavoError | OSError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error}; `octavo --debug ...` shows the traceback"


def _say(sentence: str) -> None:
    click.echo(f"octavo: {printable(' '.join(sentence.split()))}", err=True)


def _leave_closed_stdout() -> None:
    """Point stdout at nothing, or the interpreter would complain when it flushes at the end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)

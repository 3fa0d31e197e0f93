"""`octavo completion`: the script that lets a shell complete commands, flags and their values."""

import click
from click.shell_completion import get_completion_class

# The shell's script sets this variable to say what it wants; `octavo.commands.command_line` then answers it.
COMPLETION_VARIABLE = "_OCTAVO_COMPLETE"

_PROGRAM = "octavo"


# click keeps the line breaks of a paragraph that begins with \\b.
_HELP = """Print the script for completion in SHELL.

\b
bash: put this into ~/.bashrc (bash 4.4 or newer)
  eval "$(octavo completion bash)"
zsh: put this into ~/.zshrc, below compinit
  eval "$(octavo completion zsh)"
fish: run this once
  octavo completion fish > ~/.config/fish/completions/octavo.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script for completion in SHELL."""
    completion_class = get_completion_class(shell)
    assert completion_class is not None, "click knows the shells that it has an argument for"
    root = click.get_current_context().find_root().command
    script = completion_class(root, {}, _PROGRAM, COMPLETION_VARIABLE)
    # Not `source()`, which looks for a bash on this machine: the script may be for another one.
    click.echo(script.source_template % script.source_vars())

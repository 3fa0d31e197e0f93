"""Completion in a real shell, by the script that the command prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.commands.command_line import run
from tests.support.each_row import each_row
from tests.support.patience import PATIENCE_S

# Loads the script, lets bash's own machinery find the function of `octavo`, and calls it for a line with the cursor
# at its end.
BASH = """
    source /dev/stdin
    COMP_WORDS=($1 "$2")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    function=$(complete -p octavo | sed 's/.* -F \\([^ ]*\\) .*/\\1/')
    $function octavo "$2" ""
    printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(words: str, beginning: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what bash offers for the last word of a line."""
    assert run(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    program = folder / "octavo"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m octavo.cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "--norc", "-c", BASH, "bash", words, beginning]
    shell = subprocess.run(
        command, input=script, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert shell.stderr == ""
    return shell.stdout.split()


@pytest.mark.parametrize(
    ("words", "beginning", "offered"),
    [
        ("octavo", "gen", ["generate"]),
        ("octavo model", "", ["path", "prepare"]),
        ("octavo generate", "--max", ["--max-tokens"]),
        ("octavo up --device", "c", ["cpu", "cuda"]),
        ("octavo generate", "--no-such", []),
    ],
)
def test_bash_completes_commands_flags_and_values(
    words: str, beginning: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert complete(words, beginning, tmp_path, capsys) == offered


@each_row(
    ("bash", "complete -o nosort -F"), ("zsh", "#compdef octavo"), ("fish", "complete --no-files --command octavo")
)
def test_each_shell_has_its_script(shell: str, line: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert line in script
    assert "_OCTAVO_COMPLETE" in script


def test_help_says_where_the_script_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(place in shown for place in ("~/.bashrc", "~/.zshrc", "~/.config/fish/completions/octavo.fish"))

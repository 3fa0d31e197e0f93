"""Rewrites a scheduler's sentences: flags of the command line in place of fields of its interface."""

import re

import click

# A person gave one text, whatever the request made of it; `text is set` would be about the field.
_PROMPT = re.compile(r"^(text|messages) is (?=\d)")
_ENCODER_PROMPT = re.compile(r"^encoder_prompt\.text\b")
# What other servers call it, and what it is here; docs/coming-from.md has the tables.
_FLAGS_ELSEWHERE = {
    "--port": "--listen HOST:PORT",
    "--host": "--listen HOST:PORT",
    "--tensor-parallel-size": "--tp",
    "--api-key": "--tokens-file",
    "--num-predict": "--max-tokens",
    "--num-ctx": "--max-model-len",
}
_COMMANDS_ELSEWHERE = {
    "run": "octavo up MODEL, then octavo chat",
    "run-batch": "octavo batch IN.jsonl OUT.jsonl",
    "ps": "octavo top",
    "show": "octavo list",
    "stop": "Ctrl-C in the terminal of octavo up",
    "rm": "hf cache rm",
}
_NAME = re.compile(r"(?P<prefix>sampling_params\.(?:grammar\.)?)?\b(?P<name>[a-z]\w*)\b")


def in_flags(sentence: str, context: click.Context) -> str:
    """Return a sentence with the flags of the context's command in place of the fields that they set.

    `sampling_params.banned_words is ...` becomes `--ban is ...`, and `messages is ...`, of a chat: `the prompt is ...`.
    """
    flags = {
        param.name: max(param.opts, key=len) for param in context.command.params if isinstance(param, click.Option)
    }

    def to_flag(match: re.Match[str]) -> str:
        # A single word such as `stop` may be one of the sentence; `best_of` is not, nor is what the sentence is about.
        is_field = match["prefix"] or "_" in match["name"] or match.start() == 0
        name = "grammar" if match["name"] == "lark" else match["name"]
        return flags.get(name, match[0]) if is_field else match[0]

    return _PROMPT.sub("the prompt is ", _NAME.sub(to_flag, _ENCODER_PROMPT.sub("encoder_prompt", sentence)))


def flag_here(flag: str) -> str | None:
    """Return what a flag of vLLM or Ollama is called here; None: it has no other name."""
    return _FLAGS_ELSEWHERE.get(flag)


def command_here(name: str) -> str | None:
    """Return what does here what a command of vLLM or Ollama does; None: nothing has another name."""
    return _COMMANDS_ELSEWHERE.get(name)

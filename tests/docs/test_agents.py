"""What `octavo up` prints for agents is what their pages say."""

import json
import re
import shlex
import tomllib

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.commands.agents import LEAST_CONTEXT_TOKENS
from octavo.commands.up import say_how_to_use_http
from octavo_shared.step_wire.executor_info import TokenizerFile
from tests.docs.pages import REPOSITORY
from tests.support.each_row import each_row
from tests.support.stack import running_stack

URL = "http://127.0.0.1:8080"


def flat(table: dict[str, object], prefix: str = "") -> dict[str, str]:
    """Return the settings of a TOML table by their dotted names, as texts."""
    settings: dict[str, str] = {}
    for name, value in table.items():
        settings |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": str(value)}
    return settings


def codex_of_the_page(model: str, num_tokens: int) -> dict[str, str]:
    page = (REPOSITORY / "docs/responses.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    return flat(tomllib.loads(block)) | {"model": model, "model_context_window": str(num_tokens)}


def claude_of_the_page(model: str) -> dict[str, str]:
    page = (REPOSITORY / "docs/messages.md").read_text(encoding="utf-8")
    variables = dict(re.findall(r"^export (\w+)=(\S+)$", page, re.MULTILINE))
    return {name: model if name.endswith("_MODEL") else value for name, value in variables.items()}


@each_row(LEAST_CONTEXT_TOKENS, LEAST_CONTEXT_TOKENS - 1)
async def test_up_prints_both_set_ups_where_the_context_is_long_enough(
    num_tokens: int, *, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = FakeWorker(max_model_len=num_tokens, num_device_blocks=2100)
    async with running_stack(worker, served_model_name="My Model's 4B") as stack:
        await say_how_to_use_http(stack.address, URL)
    printed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    if num_tokens < LEAST_CONTEXT_TOKENS:
        assert set(printed) == {"OpenAI API of My Model's 4B", "try"}
        return
    program, *flags = shlex.split(printed["Codex CLI"])
    assert (program, set(flags[::2])) == ("codex", {"-c"})
    assert dict(flag.split("=", 1) for flag in flags[1::2]) == codex_of_the_page("My Model's 4B", num_tokens)
    *variables, program = shlex.split(printed["Claude Code"])
    assert program == "claude"
    assert dict(variable.split("=", 1) for variable in variables) == claude_of_the_page("My Model's 4B")


class _WorkerWithoutTemplate(FakeWorker):
    def tokenizer_files(self) -> tuple[TokenizerFile, ...]:
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        return (super().tokenizer_files()[0], TokenizerFile("tokenizer_config.json", json.dumps(config).encode()))


@pytest.mark.parametrize(
    ("max_encoder_tokens", "does"),
    [(0, "continues texts, and does not chat"), (99, "reads a text, and writes another")],
)
async def test_up_prints_no_chat_for_a_model_that_cannot(
    max_encoder_tokens: int, does: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_stack(
        _WorkerWithoutTemplate(max_encoder_tokens=max_encoder_tokens), served_model_name="base"
    ) as stack:
        await say_how_to_use_http(stack.address, URL, has_page=True)
    why, where, command = capsys.readouterr().out.splitlines()
    assert why == f"this model has no chat template: it {does}"
    assert where == f"OpenAI API of base: {URL}/v1"
    assert command.startswith(f"try: curl {URL}/v1/completions -H ")


def test_the_pages_say_how_much_context_agents_need() -> None:
    for page in ("docs/responses.md", "docs/messages.md"):
        assert f"{LEAST_CONTEXT_TOKENS:,}" in (REPOSITORY / page).read_text(encoding="utf-8")

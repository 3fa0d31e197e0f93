"""The commands as a person runs them: a process of its own against a stand-in scheduler."""

import asyncio
import importlib.abc
import io
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

import octavo
from octavo.cli import main
from octavo.commands.command_line import run as run_here
from tests.support.each_row import each_row
from tests.unit.octavo.stand_in import StandIn


@dataclass(frozen=True)
class Ended:
    status: int
    stdout: str
    stderr: str


@asynccontextmanager
async def started(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "octavo.cli", *args)
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(*args: str, stdin: str | bytes = "") -> Ended:
    """Run a command in a thread, with streams of its own: the start of a process took longer than most commands."""
    given = io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(given, "utf-8"))
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True))
        stdout, stderr = sys.stdout.buffer, sys.stderr.buffer
        status = await asyncio.to_thread(run_here, args)
        assert isinstance(stdout, io.BytesIO)
        assert isinstance(stderr, io.BytesIO)
        return Ended(status, stdout.getvalue().decode(), stderr.getvalue().decode())


async def test_generate_streams_the_text(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--address", stand_in.address)
    assert ended == Ended(0, "The sky is blue\n", "")


async def test_text_is_printed_before_the_answer_is_complete(stand_in: StandIn) -> None:
    async with started("generate", "endless", "--address", stand_in.address) as process:
        assert process.stdout is not None
        assert await process.stdout.readexactly(12) == b"again again "


async def test_no_stream_prints_the_same(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--no-stream", "--address", stand_in.address)
    assert ended == Ended(0, "The sky is blue\n", "")


async def test_json_is_one_line_with_everything(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--json", "--logprobs", "0", "--address", stand_in.address)
    assert ended.stdout.count("\n") == 1
    answer = json.loads(ended.stdout)
    assert (answer["request_id"], answer["prompt"]) == ("made-by-server", "Why?")
    assert answer["outputs"][0]["token_ids"] == [0, 1, 2, 3]
    assert answer["outputs"][0]["finish_reason"] == "stop"
    assert answer["usage"]["num_output_tokens"] == 4


async def test_a_dash_reads_the_prompt_from_stdin(stand_in: StandIn) -> None:
    await run("generate", "-", "--address", stand_in.address, stdin="two\nlines")
    assert stand_in.requests[0].text == "two\nlines"


async def test_generate_sends_the_request_id(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--request-id", "mine-7", "--json", "--address", stand_in.address)
    assert stand_in.requests[0].request_id == json.loads(ended.stdout)["request_id"] == "mine-7"


async def test_an_empty_prompt_is_refused_before_anything_is_sent(stand_in: StandIn) -> None:
    for prompt in ("", "-"):
        ended = await run("generate", prompt, "--address", stand_in.address)
        assert ended == Ended(2, "", 'octavo: the prompt is empty; give a text; see "octavo generate --help"\n')
    assert stand_in.requests == []


async def test_bytes_that_are_no_text_are_refused(stand_in: StandIn) -> None:
    ended = await run("generate", "-", "--address", stand_in.address, stdin=b"\xff\xfe")
    assert ended == Ended(1, "", "octavo: standard input is not UTF-8 text\n")


async def test_an_error_in_the_middle_of_an_answer_has_its_own_line(stand_in: StandIn) -> None:
    ended = await run("generate", "break", "--address", stand_in.address)
    assert ended == Ended(1, "The\n", "octavo: a broken invariant (INTERNAL)\n")


async def test_the_chat_template_is_used_if_there_is_one_unless_raw(stand_in: StandIn) -> None:
    stand_in.has_chat_template = True
    await run("generate", "Why?", "--address", stand_in.address)
    await run("generate", "Why?", "--raw", "--address", stand_in.address)
    chat, raw = stand_in.requests
    assert [(turn.role, turn.content) for turn in chat.messages.messages] == [("user", "Why?")]
    assert raw.text == "Why?"


async def test_flags_of_accounts_arrive(stand_in: StandIn) -> None:
    flags = "--priority -1 --tenant red --cache-salt secret --model small --lora-adapter poet"
    await run("generate", "Why?", *flags.split(), "--address", stand_in.address)
    [request] = stand_in.requests
    assert (request.priority, request.tenant, request.cache_salt, request.model) == (-1, "red", "secret", "small")
    assert request.lora_adapter == "poet"


@each_row(
    (["now", "--encoder-prompt", "long ago"], "", ("now", "long ago")),
    (["now", "--encoder-prompt", "-"], "long ago", ("now", "long ago")),
    (["-", "--encoder-prompt", "long ago"], "now", ("now", "long ago")),
)
async def test_an_encoder_reads_its_flag_and_the_prompt_is_sent_unchanged(
    args: list[str], stdin: str, sent: tuple[str, str], *, stand_in: StandIn
) -> None:
    stand_in.has_chat_template = True
    ended = await run("generate", *args, "--address", stand_in.address, stdin=stdin)
    assert ended.status == 0
    request = stand_in.requests.pop()
    assert (request.text, request.encoder_prompt.text) == sent


async def test_flags_that_are_not_given_are_not_sent(stand_in: StandIn) -> None:
    await run("generate", "Why?", "--address", stand_in.address)
    sent = {field.name for field, _ in stand_in.requests[0].ListFields()}
    assert sent <= {"text", "sampling_params", "lean_finished", "include_prompt_token_ids", "include_provenance"}
    assert [field.name for field, _ in stand_in.requests[0].sampling_params.ListFields()] == ["max_tokens"]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (["--n", "2"], ("", "")),
        (["--n", "2", "--best-of", "3"], (", log-probability -2.000", ", log-probability -3.000")),
        (["--n", "2", "--beam-width", "2"], (", score -0.500", ", score -1.500")),
    ],
)
async def test_several_outputs_are_printed_one_after_another(
    flags: list[str], ranks: tuple[str, str], stand_in: StandIn
) -> None:
    ended = await run("generate", "Why?", *flags, "--address", stand_in.address)
    expected = (
        f"--- output 1 of 2{ranks[0]} ---\nThe sky is blue\n--- output 2 of 2{ranks[1]} ---\n1The1 sky1 is1 blue\n"
    )
    assert ended == Ended(0, expected, "")


async def test_json_has_all_outputs(stand_in: StandIn) -> None:
    ended = await run("generate", "Why?", "--n", "2", "--beam-width", "2", "--json", "--address", stand_in.address)
    outputs = json.loads(ended.stdout)["outputs"]
    assert [output["output_index"] for output in outputs] == [0, 1]
    assert [output["beam_score"] for output in outputs] == [-0.5, -1.5]


async def test_a_refusal_is_the_schedulers_sentence_with_the_flag_in_place_of_the_field(stand_in: StandIn) -> None:
    ended = await run("generate", "refuse", "--address", stand_in.address)
    assert ended == Ended(1, "", "octavo: --top-p is 2; it must be at most 1\n")


async def test_debug_adds_the_traceback(stand_in: StandIn) -> None:
    ended = await run("--debug", "generate", "refuse", "--address", stand_in.address)
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.splitlines()[-1] == "octavo: --top-p is 2; it must be at most 1"


async def test_ctrl_c_aborts_the_request(stand_in: StandIn) -> None:
    async with started("generate", "endless", "--address", stand_in.address) as process:
        assert process.stdout is not None
        await process.stdout.readexactly(6)
        process.send_signal(signal.SIGINT)
        _, stderr = await process.communicate()
    assert (process.returncode, stderr.strip()) == (130, b"")
    await stand_in.call_ended.wait()


def test_ctrl_c_while_the_program_loads_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "octavo.commands.command_line":
                raise KeyboardInterrupt

    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "octavo.commands.command_line", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 130
    assert capsys.readouterr() == ("", "")


async def test_a_reader_that_leaves_ends_the_program_quietly(stand_in: StandIn) -> None:
    async with started("generate", "endless", "--address", stand_in.address) as process:
        assert process.stdout is not None
        await process.stdout.readexactly(6)
        process.stdout._transport.close()  # type: ignore[attr-defined]  # what `| head` does
        await process.wait()
        assert process.stderr is not None
        assert (process.returncode, await process.stderr.read()) == (141, b"")
    await stand_in.call_ended.wait()


@each_row(
    (["generate", "Why?", "--logprobs", "0"], "--logprobs needs --json"),
    (["generate", "-", "--encoder-prompt", "-"], "PROMPT and --encoder-prompt both read stdin"),
    (["generate", "a", "--encoder-prompt", ""], "the encoder prompt is empty; give a text"),
    (["chat", "--n", "2"], "No such option"),
    (["chat", "--encoder-prompt", "a"], "No such option"),
    (["generate", "Why?", "--timeout", "0"], "--timeout"),
    (["generate", "Why?", "--timeout", "nan"], "'nan' is not a number"),
    (["top", "--interval", "nan"], "'nan' is not a number"),
    (["zzz"], "No such command 'zzz'"),
)
def test_a_wrong_command_line_is_one_line(
    args: list[str], sentence: str, *, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(args)
    captured = capsys.readouterr()
    assert exit_info.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("octavo: ")
    assert captured.err.count("\n") == 1
    assert sentence in captured.err


def test_a_sentence_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "Why?", "--token-file", "a\x1b[2Jb"])
    assert r"--token-file a\x1b[2Jb cannot be read" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in ("chat", "completion", "demo", "generate", "model", "up"))


async def test_the_command_line_loads_no_heavy_package() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'pydantic'}"
    commands = ", ".join(f"octavo.commands.{name}" for name in ("command_line", "demo", "up", "chat"))
    modules = f"octavo.cli, octavo.local.llm, {commands}"
    program = f"import sys, {modules}; print({heavy} & set(sys.modules))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    stdout, _ = await process.communicate()
    assert stdout == b"set()\n"


class Without:
    """A finder that finds nothing of the executor's extra."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("gguf", "safetensors", "torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_a_command_in_an_installation_of_the_scheduler_names_the_extras() -> None:
    lines = ("list", "pull smollm2", "up smollm2", "demo")
    program = (
        "import sys; from octavo.cli import main; from tests.unit.octavo.test_cli import Without\n"
        "sys.meta_path.insert(0, Without())\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as end: print('ended with', end.code, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", program, *lines], capture_output=True, text=True, timeout=60)
    *told, rest = ended.stderr.split("ended with 1\n")
    assert (len(told), rest) == (len(lines), "")
    for line, said in zip(lines, told, strict=True):
        needed = f"octavo {line.split()[0]} needs the package gguf: pip install '.[scheduler,executor]' in a clone"
        assert said.splitlines()[-1:] == [f"octavo: {needed}"]

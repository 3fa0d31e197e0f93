"""`octavo batch` against the real scheduler: what it writes, what a crash leaves, and what is asked again."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo.batch.batch_file import seed_of
from octavo.commands.command_line import run
from tests.contract.openai.api import Api, running_api
from tests.support.certificates import Authority
from tests.support.stack import until

Json = dict[str, Any]
BODY: Json = {"prompt": "hello", "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}


def line(custom_id: str, url: str = "/v1/completions", **fields: object) -> Json:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": dict(fields or BODY)}


def write(path: Path, lines: Sequence[Json]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


def read(path: Path) -> dict[str, Json]:
    """Return the answers by custom_id; each has one."""
    lines = [json.loads(each) for each in path.read_text().splitlines()]
    answers: dict[str, Json] = {each["custom_id"]: each for each in lines}
    assert len(answers) == len(lines)
    assert all(set(each) == {"id", "custom_id", "response", "error"} for each in lines)
    return answers


def choices(path: Path) -> dict[str, Any]:
    return {name: each["response"]["body"]["choices"] for name, each in read(path).items()}


async def batch(api: Api, *args: object) -> int:
    """Run the command in this process; return its exit status."""
    return await asyncio.to_thread(run, ["batch", "--base-url", f"{api.url}/v1", *map(str, args)])


@asynccontextmanager
async def started(api: Api, *args: object) -> AsyncIterator[asyncio.subprocess.Process]:
    command = (sys.executable, "-m", "octavo.cli", "batch", "--base-url", f"{api.url}/v1", *map(str, args))
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_each_line_is_answered_in_openais_shape_as_the_api_itself_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampled: Json = {"temperature": 1.0, "max_output_tokens": 8}
    requests = [
        line("first", **BODY, seed=None),
        line("seeded", **BODY, seed=7),
        line(
            "chat", "/v1/chat/completions", messages=[{"role": "user", "content": "ü"}], max_tokens=8, temperature=1.0
        ),
        line("response", "/v1/responses", input="hello", **sampled),
        line("named", model="wrong", **BODY),
    ]
    out = tmp_path / "out.jsonl"
    async with running_api() as api:
        assert await batch(api, write(tmp_path / "in.jsonl", requests), out) == 1
        answers = read(out)
        for request in requests[:-1]:
            seed = {"model": "fake", **request["body"]}
            seed["seed"] = seed.get("seed") or seed_of(request["custom_id"])
            expected = (await api.send("POST", request["url"], json=seed)).json
            response = answers[request["custom_id"]]["response"]
            assert (response["status_code"], answers[request["custom_id"]]["error"]) == (200, None)
            assert len(response["request_id"]) == 32
            if request["custom_id"] == "response":
                texts = [each["output"][0]["content"] for each in (response["body"], expected)]
            else:
                texts = [each["choices"] for each in (response["body"], expected)]
            assert texts[0] == texts[1]
        assert answers["first"]["response"]["body"]["choices"] != answers["seeded"]["response"]["body"]["choices"]
        refused = answers["named"]["response"]
        assert (refused["status_code"], refused["body"]["error"]["code"]) == (404, "model_not_found")
        err = capsys.readouterr().err
        assert err == "5 requests: 4 answered, 1 failed with HTTP 404; --resume asks for the rest\n"

        good = {name: answer for name, answer in answers.items() if name != "named"}
        assert await batch(api, tmp_path / "in.jsonl", out, "--resume", "--model", "fake") == 0
        assert {name: answer for name, answer in read(out).items() if name != "named"} == good
        assert read(out)["named"]["response"]["status_code"] == 200
        assert capsys.readouterr().err == "5 requests: 5 answered (4 by an earlier run)\n"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
async def test_after_an_end_in_the_middle_only_the_rest_is_asked_and_all_is_as_from_one_run(
    tmp_path: Path, how: signal.Signals
) -> None:
    path = write(tmp_path / "in.jsonl", [line(f"request-{number}") for number in range(40)])
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    async with running_api(FakeWorker(step_ms=5)) as api:
        assert await batch(api, path, whole) == 0
        args = (path, out, "--max-in-flight", 4)
        async with started(api, *args) as process:
            await until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 5)
            process.send_signal(how)
            assert await process.wait() == (130 if how is signal.SIGINT else -how)
        await until(lambda: not api.stack.engine.requests)
        before = out.read_bytes()
        num_before = before.count(b"\n")
        assert num_before < 40
        assert before.endswith(b"\n")
        out.write_bytes(before + b'{"id": "batch_req_request-39", "custom_id": "requ')  # what a full disk would leave

        assert await batch(api, *args) == 1  # without --resume nothing is touched
        assert out.read_bytes().startswith(before + b"{")
        num_asked = len(api.stack.engine.ended)
        assert await batch(api, *args, "--resume") == 0
        assert len(api.stack.engine.ended) - num_asked == 40 - num_before
        assert out.read_bytes().startswith(before)
        assert choices(out) == choices(whole)
        assert await batch(api, *args, "--resume") == 0  # and there is nothing left to do
        assert len(api.stack.engine.ended) - num_asked == 40 - num_before


async def test_two_runs_do_not_write_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "in.jsonl", [line("one")])
    out = tmp_path / "out.jsonl"
    async with running_api(FakeWorker(step_ms=50)) as api, started(api, path, out):
        await until(out.exists)
        await until(lambda: api.stack.engine.requests)
        assert await batch(api, path, out) == 1
    assert capsys.readouterr().err == f"octavo: another octavo batch writes to {out}\n"


async def test_it_brings_its_token_over_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    files, ca = authority.issue("127.0.0.1").write(tmp_path / "server"), authority.write(tmp_path / "ca.crt")
    tokens, token = tmp_path / "tokens", tmp_path / "token"
    token.write_text("the-right-token-of-blue")
    tokens.write_text("blue the-right-token-of-blue\n")
    path, out = write(tmp_path / "in.jsonl", [line("one")]), tmp_path / "out.jsonl"
    settings = {"tls_cert": files.cert, "tls_key": files.key, "tokens_file": tokens}
    async with running_api(**settings) as api:
        url = ("--base-url", f"{api.url.replace('http:', 'https:')}/v1")
        for flags, said in (
            (("--tls-ca", ca), "refuses /v1/models: HTTP 401: a bearer token is required"),
            (("--token-file", token), "its certificate is not trusted: unable to get local issuer certificate"),
            (("--tls-ca", ca, "--token-file", token), "1 request: 1 answered\n"),
        ):
            assert await batch(api, path, out, *url, *flags) == (0 if "answered" in said else 1)
            assert said in capsys.readouterr().err

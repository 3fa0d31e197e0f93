"""`octavo batch`: what of its files and flags is refused, and how it meets a server that is busy or away."""

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from octavo.batch import runner
from octavo.commands.command_line import run
from tests.support.each_row import each_row

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
ANSWER = {"id": "batch_req_a", "custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}


@asynccontextmanager
async def server(
    answers: Sequence[int | None], models: Sequence[str] = ("m",), *, leaves: bool = False, loading: int = 0
) -> AsyncIterator[tuple[str, list[Any]]]:
    """Answer requests with these statuses in turn, the last one for ever; None: break the connection, or leave.

    The first `loading` lists of models are refused.
    """
    bodies: list[Any] = []
    refusals = iter(range(loading))

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models" and next(refusals, None) is not None:
            return web.json_response({"error": {"message": "loading"}}, status=503)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": model} for model in models]})
        status = answers[min(len(bodies), len(answers) - 1)]
        bodies.append(await request.json())
        if status is None:
            assert request.transport is not None
            if leaves:
                await site.stop()
            request.transport.abort()
        return web.json_response({"status": status}, status=status or 200, headers={"Retry-After": "0"})

    running = web.ServerRunner(web.Server(answer))
    await running.setup()
    site = web.TCPSite(running, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{running.addresses[0][1]}/v1", bodies
    finally:
        await running.cleanup()


async def answered(tmp_path: Path, url: str, *flags: str, line: Any = GOOD) -> tuple[int, dict[str, Any]]:
    """Run a batch of one line; return the exit status and the answer."""
    (tmp_path / "in").write_text(json.dumps(line))
    out = tmp_path / "out"
    out.unlink(missing_ok=True)
    status = await asyncio.to_thread(run, ["batch", str(tmp_path / "in"), str(out), "--base-url", url, *flags])
    [told] = map(json.loads, out.read_text().splitlines() or ["{}"])
    return status, told


@each_row(
    ([429, 503, 502, 504, 200], 200),
    ([400], 400),
    ([500, 200], 500),
    ([None, None, 200], 200),
    ([None, None, None, 200], "connection_failed"),
)
async def test_what_is_for_the_moment_is_tried_again(
    statuses: Sequence[int | None], ends: int | str, *, tmp_path: Path
) -> None:
    async with server(statuses) as (url, bodies):
        status, answer = await answered(tmp_path, url)
    num_tries = statuses.index(200) + 1 if ends == 200 else 3 if ends == "connection_failed" else 1
    assert (status, len(bodies)) == (0 if ends == 200 else 1, num_tries)
    if isinstance(ends, int):
        assert answer["response"] == {"status_code": ends, "request_id": None, "body": {"status": ends}}
        assert answer["error"] is None
    else:
        broke = "the connection broke before the answer was complete"
        assert (answer["response"], answer["error"]) == (None, {"code": ends, "message": broke})


@each_row(
    ({}, (), ("m",), "m"),
    ({}, (), ("m", "n"), None),
    ({"model": "own"}, (), ("m",), "own"),
    ({"model": "own"}, ("--model", "flag"), ("m",), "flag"),
)
async def test_the_model_is_that_of_the_flag_of_the_line_or_the_only_one(
    body: dict[str, Any], flags: Sequence[str], models: Sequence[str], sent: str | None, *, tmp_path: Path
) -> None:
    async with server([200], models) as (url, bodies):
        await answered(tmp_path, url, *flags, line={**GOOD, "body": body})
    assert bodies[0].get("model") == sent
    # sha256("a") begins with ca978112
    assert bodies[0]["seed"] == 0xCA978112


@each_row(
    ({"method": "GET"}, 'method must be POST, not "GET"'),
    (
        {"url": "/v1/rerank"},
        'url must be one of /v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings, not "/v1/rerank"',
    ),
    ({"body": "x"}, "body must be a JSON object"),
    ({"body": {"stream": True}}, "body.stream must be false or absent"),
)
async def test_a_line_that_cannot_be_asked_has_its_error(changed: dict[str, Any], said: str, *, tmp_path: Path) -> None:
    async with server([200]) as (url, bodies):
        status, answer = await answered(tmp_path, url, line={**GOOD, **changed})
    assert (status, bodies, answer["response"], answer["error"]["code"]) == (1, [], None, "invalid_request")
    assert answer["error"]["message"].startswith(said)


async def test_a_line_that_is_nested_too_deeply_ends_alone(tmp_path: Path) -> None:
    deep = json.dumps(GOOD).replace('"x"', "[" * 100_000 + "]" * 100_000)
    (tmp_path / "in").write_text(f"{deep}\n{json.dumps({**GOOD, 'custom_id': 'b'})}\n")
    async with server([200]) as (url, bodies):
        command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--base-url", url]
        assert await asyncio.to_thread(run, command) == 1
    told = {line["custom_id"]: line for line in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert told["a"]["error"] == {"code": "invalid_request", "message": "the line is nested too deeply"}
    assert (told["b"]["response"]["status_code"], len(bodies)) == (200, 1)


async def test_a_pipe_is_read_and_embeddings_get_no_seed(tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe", tmp_path / "out"
    os.mkfifo(pipe)
    line = {**GOOD, "url": "/v1/embeddings", "body": {"input": "x"}}
    async with server([200]) as (url, bodies):
        running = asyncio.to_thread(run, ["batch", str(pipe), str(out), "--base-url", url])
        status, _ = await asyncio.gather(running, asyncio.to_thread(pipe.write_text, json.dumps(line)))
    assert (status, bodies) == (0, [{"input": "x", "model": "m"}])


async def test_a_server_that_still_loads_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "_FIRST_WAIT_S", 0.01)
    async with server([200], loading=2) as (url, bodies):
        assert (await answered(tmp_path, url))[0] == 0
    assert len(bodies) == 1
    assert "is not ready: loading; waiting up to 300 s" in capsys.readouterr().err


async def test_a_server_that_stays_away_ends_the_batch_and_leaves_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PATIENCE_S", 0.6)
    lines = [{**GOOD, "custom_id": str(number)} for number in range(3)]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    async with server([200, None], leaves=True) as (url, _):
        command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--base-url", url, "--max-in-flight", "1"]
        assert await asyncio.to_thread(run, command) == 1
        at = url.removesuffix("/v1")
        reason = "the connection broke before the answer was complete"
        assert capsys.readouterr().err == (
            f"octavo: the server at {at} does not answer ({reason}); waiting up to 0.6 s\n"
            "3 requests: 1 answered; --resume asks for the rest\n"
            f"octavo: the server at {at} has not answered for 0.6 s ({reason})\n"
        )
        [done] = map(json.loads, (tmp_path / "out").read_text().splitlines())
        assert done["custom_id"] == "0"

        assert await asyncio.to_thread(run, [*command, "--resume"]) == 1
        assert capsys.readouterr().err == (
            "3 requests: 1 answered (1 by an earlier run); --resume asks for the rest\n"
            f'octavo: no server answers at {at} (connection refused); start one with "octavo up"\n'
        )


async def test_a_server_that_stays_busy_has_its_refusal_as_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "PATIENCE_S", 0.2)
    async with server([503]) as (url, bodies):
        status, answer = await answered(tmp_path, url)
    assert (status, answer["response"]["status_code"]) == (1, 503)
    assert len(bodies) > 1


@each_row(
    ("", None, "in has no requests"),
    ("{", None, "in:1 is not a JSON object"),
    ('{"custom_id": "a"}\n[]', None, "in:2 is not a JSON object"),
    ("{}", None, "in:1 needs a custom_id, a string that names the request"),
    ('{"custom_id": 1}', None, "in:1 needs a custom_id, a string that names the request"),
    ('{"custom_id": "a"}\n\n{"custom_id": "a"}', None, 'in:3 has the custom_id "a" of a line before it'),
    (json.dumps(GOOD), "x\n", "out:1 is not an answer of a batch; give another file"),
    (json.dumps(GOOD), json.dumps(GOOD) + "\n", "out:1 is not an answer of a batch; give another file"),
    (
        json.dumps(GOOD),
        json.dumps({**ANSWER, "custom_id": "b"}) + "\n",
        "out:1 answers 'b', which the batch does not ask; give another file",
    ),
)
def test_files_that_are_wrong_are_refused_before_anything_is_sent_and_stay_as_they_are(
    asked: str, told: str | None, said: str, *, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text(asked)
    (tmp_path / "out").write_text(told or "")
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--resume", "--base-url", "http://127.0.0.1:1"]
    assert run(command) == 1
    assert capsys.readouterr().err == f"octavo: {tmp_path}/{said}\n"
    assert (tmp_path / "out").read_text() == (told or "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


@each_row(
    (("no/in", "out"), "no/in cannot be read: No such file or directory"),
    (("in", "no/out"), "no/out cannot be written: No such file or directory"),
    (("in", "in"), "in has answers already; to go on with them, use --resume"),
    (("in", "in", "--resume"), "in:1 is not an answer of a batch; give another file"),
)
def test_paths_that_are_wrong_are_named(
    args: Sequence[str],
    said: str,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(json.dumps(GOOD) + "\n")
    assert run(["batch", *args]) == 1
    assert capsys.readouterr().err == f"octavo: {said}\n"


@each_row(
    "--base-url=127.0.0.1:8080",
    "--base-url=ftp://host/v1",
    "--base-url=http://host:x/v1",
    "--base-url=http:///v1",
    "--tls-ca=ca.crt",
)
def test_flags_that_are_wrong_are_one_line(flag: str, *, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", "in", "out", flag]) == 2
    assert "--base-url" in capsys.readouterr().err


def test_a_token_goes_in_plaintext_to_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", "in", "out", "--base-url", "http://host.example/v1", "--token", "secret"]) == 1
    assert capsys.readouterr().err.startswith("octavo: the token would be sent to host.example:80 in plaintext;")


def test_without_the_extra_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "aiohttp" else find_spec(name, package)
    )
    assert run(["batch", "in", "out"]) == 1
    assert capsys.readouterr().err == "octavo: octavo batch needs aiohttp: pip install '.[batch]' in a clone\n"

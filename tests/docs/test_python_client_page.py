"""Every snippet of docs/python-client.md runs as it is printed: against fake executors, `LLM` against the demo model.

Snippets with `await` at the top are the body of `async with Client(...) as client:`, as the page says; whole programs
run in a thread of their own. Only the address and the names of files are exchanged.
"""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from executor_svc.fake.worker import FakeWorker
from octavo import Client, SamplingParams
from tests.support.certificates import Authority
from tests.support.stack import running_stack

PAGE = Path(__file__).parents[2] / "docs" / "python-client.md"
ADDRESS = "127.0.0.1:50051"
TLS_ADDRESS = "localhost:50051"
TOKEN = "a-token-of-the-page-00"


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def kind_of(snippet: str) -> str:
    """Return who can run a snippet: "LLM", "TLS", "program" or "body"."""
    if "LLM(" in snippet:
        return "LLM"
    if "TlsOptions(" in snippet:
        return "TLS"
    return "program" if "asyncio.run(" in snippet else "body"


def snippets_of(kind: str) -> list[str]:
    found = [snippet for snippet in snippets() if kind_of(snippet) == kind]
    assert found, f"the page has no snippet of the kind {kind}"
    return found


def compiled(snippet: str) -> CodeType:
    code: CodeType = compile(snippet, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


async def run(snippet: str, **names: Any) -> dict[str, Any]:
    """Run a snippet with these names; return all that it knows at its end."""
    namespace: dict[str, Any] = {"__name__": "__main__", **names}
    code = compiled(snippet)
    if code.co_flags & inspect.CO_COROUTINE:
        await eval(code, namespace)
    else:
        await asyncio.to_thread(exec, code, namespace)
    return namespace


async def test_programs_and_bodies_run_against_a_scheduler() -> None:
    # Steps of 2 ms, so that 5000 tokens outlast the time limit that the page shows.
    async with running_stack(FakeWorker(has_pooling=True, step_ms=2.0)) as stack, Client(stack.address) as client:
        for snippet in snippets_of("program"):
            assert ADDRESS in snippet
            await run(snippet.replace(ADDRESS, stack.address))
        for snippet in snippets_of("body"):
            known = await run(snippet, client=client, SamplingParams=SamplingParams)
            if (output := known.get("output")) is not None:
                assert output.outputs[0].token_ids
        assert not stack.engine.requests, "a snippet left a request behind"


async def test_the_time_limit_and_the_abort_of_the_page_do_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = [snippet for snippet in snippets_of("body") if "timeout_s=0.2" in snippet]
    async with running_stack(FakeWorker(has_pooling=True, step_ms=2.0)) as stack, Client(stack.address) as client:
        await run(snippet, client=client, SamplingParams=SamplingParams)
    assert capsys.readouterr().out.splitlines() == [
        "the answer was not complete within the time limit",
        "request 'mine' was aborted",
    ]


async def test_a_refused_request_names_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    [snippet] = [snippet for snippet in snippets_of("body") if "top_p=1.5" in snippet]
    async with running_stack() as stack, Client(stack.address) as client:
        await run(snippet, client=client, SamplingParams=SamplingParams)
    assert capsys.readouterr().out.startswith("sampling_params.top_p | sampling_params.top_p is 1.5")


async def test_the_tls_snippet_reaches_a_scheduler_that_asks_for_certificate_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority()
    ca = authority.write(tmp_path / "tls" / "ca.crt")
    server = authority.issue("localhost").write(tmp_path / "server")
    client = authority.issue(common_name="client").write(tmp_path / "client")
    client.cert.rename(tmp_path / "tls" / "client.crt")
    client.key.rename(tmp_path / "tls" / "client.key")
    (tmp_path / "tokens").write_text(f"blue {TOKEN}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_TOKEN", TOKEN)
    settings: dict[str, Any] = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ca}
    settings["tokens_file"] = tmp_path / "tokens"
    async with running_stack(**settings) as stack:
        port = stack.address.rpartition(":")[2]
        for snippet in snippets_of("TLS"):
            await run(snippet.replace(TLS_ADDRESS, f"localhost:{port}"))
    assert capsys.readouterr().out.strip(), "the snippet prints the model's name"


def test_every_page_line_of_the_error_tree_is_in_the_code() -> None:
    from octavo import errors

    drawn = re.findall(
        r"^    (?:│   |    )?[├└]── (.+)$|^    (OctavoError)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(drawn) > 10
    documented = errors.__doc__ or ""
    for line in (branch or root for branch, root in drawn):
        assert re.sub(r"\s+", " ", line) in re.sub(r"\s+", " ", documented)


@pytest.mark.model
@pytest.mark.slow
def test_the_llm_snippets_answer(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answering, refused = snippets_of("LLM")
    asyncio.run(run(answering))
    assert "Paris" in capsys.readouterr().out
    asyncio.run(run(refused))
    first, second = capsys.readouterr().out.splitlines()
    refusal = "refused: prompts[1]: prompt is too long: it has 101"
    assert (first, second.partition(" tokens")[0]) == ("' 4, 5, 6'", refusal)

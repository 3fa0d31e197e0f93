"""The chat page over HTTP: its headers, who gets it, and how it is turned off. tests/page has it in a browser."""

import hashlib
import re
from importlib import resources
from pathlib import Path

from tests.contract.openai.api import Api, running_api

FOLDER = resources.files("scheduler_svc.front.openai")
FOREIGN = {"Sec-Fetch-Site": "cross-site"}


async def test_anybody_gets_one_file_that_may_load_nothing_else(api: Api) -> None:
    page = await api.get("/", headers=FOREIGN)  # a link
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert {name: sources for name, sources in policy.items() if name not in ("script-src", "style-src")} == {
        **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
        "connect-src": "'self'",
        "img-src": "data:",
    }
    assert re.fullmatch(r"'sha256-\S+'( 'sha256-\S+'){2}", policy["script-src"])
    assert re.fullmatch(r"'sha256-\S+'", policy["style-src"])
    ours = "".join((FOLDER / name).read_text(encoding="utf-8") for name in ("chat_page.html", "chat_page.js"))
    assert (FOLDER / "chat_page.js").read_text(encoding="utf-8") in page.text
    assert re.findall(r"https?://|url\(|\bimport\b|innerHTML|outerHTML|insertAdjacent|\.write|eval\(", ours) == []
    assert re.findall(r'<(?:link|script)[^>]* (?:src|href)="([^"]*)"', page.text) == ["data:,"]

    head = await api.send("HEAD", "/")
    assert (head.status, head.text) == (200, "")
    assert (await api.send("POST", "/")).status == 405
    assert (await api.get("/", headers={"Host": "rebound.example"})).status == 403
    assert (await api.get("/v1/models", headers=FOREIGN)).status == 403


async def test_the_page_needs_no_token_and_what_it_calls_does(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("blue the-right-token-of-blue\n")
    tokens.chmod(0o600)
    async with running_api(tokens_file=tokens) as api:
        assert (await api.get("/")).status == 200
        assert (await api.get("/v1/models")).status == 401


async def test_it_is_not_there_if_it_is_off() -> None:
    async with running_api(chat_page="off") as api:
        page = await api.get("/")
        assert page.status == 404
        assert "unknown path; the paths are /v1/chat/completions" in page.error["message"]


def test_libraries_are_as_they_were_published() -> None:
    digests = {
        "marked.umd.js": "bb95d4c15f1289f78486eaacebf3bb18688475ed58a040ef762ed49337090542",
        "purify.min.js": "f69a46022ab1f53e969c8ebbca98172c8995785a9b3be72ea4a12d25b1a1bf67",
    }
    for name, digest in digests.items():
        assert hashlib.sha256((FOLDER / "vendored" / name).read_bytes()).hexdigest() == digest

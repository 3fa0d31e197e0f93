"""The chat page in a real browser, in front of a real scheduler and a scripted executor."""

import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Request, Route, expect

from executor_svc.fake.scripted_worker import Script, ScriptedWorker
from tests.page.browser import Watched, watched_page
from tests.support.certificates import Authority
from tests.support.stack import Stack, running_stack, until

pytestmark = pytest.mark.asyncio(loop_scope="session")

HOSTILE = "<img src=x onerror='window.wasRun=1'><script>window.wasRun=1</script><b onmouseover=wasRun=1>&lt;b&gt;"

# As Markdown shows it.
SHOWN = html.unescape(HOSTILE)

# Whether any of it ran or became an element; the page has three scripts.
FOUND = "[window.wasRun, ...['img', 'script', 'b'].map((tag) => document.getElementsByTagName(tag).length)]"


@asynccontextmanager
async def opened(
    browser: Browser, script: Mapping[str, str], step_ms: float = 0.0, scheme: str = "http", **settings: object
) -> AsyncIterator[tuple[Stack, Watched]]:
    """Open the chat page of a scheduler whose model answers by a script."""
    worker = ScriptedWorker(Script(list(script.items())), step_ms=step_ms, num_device_blocks=4000)
    async with running_stack(worker, openai_listen="127.0.0.1:0", **settings) as stack:  # type: ignore[arg-type]
        address = stack.service.other_addresses["openai"]
        async with watched_page(browser, address, ignore_https_errors=True) as watched:
            watched.origin = f"{scheme}://{address}"
            await watched.open()
            yield stack, watched


async def ask(page: Page, question: str) -> None:
    await expect(page.locator("#model option")).to_have_count(1)
    await page.locator("#question").fill(question)
    await page.keyboard.press("Enter")


def streamed(events: str) -> Callable[[Route], Awaitable[None]]:
    """Return what answers a call with these events."""

    async def answer(route: Route) -> None:
        await route.fulfill(body=events, content_type="text/event-stream")

    return answer


async def has_answer(page: Page, *texts: str) -> None:
    """Return once the conversation has these texts, of the user and of the model in turns, and nothing runs."""
    await expect(page.locator("article > .text")).to_have_text(list(texts), use_inner_text=True)
    await expect(page.locator("#stop")).to_be_hidden()


async def test_a_conversation_goes_on_is_regenerated_and_cleared(browser: Browser) -> None:
    script = {"": "Pardon?", "hello": "Hi 🦊.\nHow are you?", "fine": "Good."}
    async with opened(browser, script) as (_, watched):
        page = watched.page
        bodies: list[Any] = []

        def note(request: Request) -> None:
            if request.post_data:
                bodies.append(request.post_data_json)

        page.on("request", note)
        await page.locator("summary").click()
        await page.locator("#system").fill("Be brief.")
        await page.locator("#temperature").fill("0.5")
        await page.locator("#max-tokens").fill("100")
        await ask(page, "hello")
        await has_answer(page, "hello", script["hello"])
        await ask(page, "fine")
        await has_answer(page, "hello", script["hello"], "fine", "Good.")
        await expect(page.locator("#status")).to_have_text("6 tokens")
        await page.locator("#regenerate").click()
        await until(lambda: len(bodies) == 3)
        await has_answer(page, "hello", script["hello"], "fine", "Good.")

        turns = [("system", "Be brief."), ("user", "hello"), ("assistant", script["hello"]), ("user", "fine")]
        assert bodies[1] == bodies[2]
        assert bodies[1] == {
            "model": "fake",
            "messages": [{"role": role, "content": content} for role, content in turns],
            "temperature": 0.5,
            "max_tokens": 100,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        await page.locator("#clear").click()
        await has_answer(page)
        await page.locator("#max-tokens").fill("3")
        await ask(page, "hello")
        await has_answer(page, "hello", "Hi ")
        await expect(page.locator("#status")).to_have_text("3 tokens; the answer reached its limit")
        assert len(bodies[-1]["messages"]) == 2


async def test_an_answer_is_stopped_at_the_scheduler_too(browser: Browser) -> None:
    async with opened(browser, {"": "word " * 1000}, step_ms=5) as (stack, watched):
        page = watched.page
        await ask(page, "hello")
        await expect(page.locator("article.assistant > .text")).to_contain_text("word word")
        assert len(stack.engine.requests) == 1
        await page.locator("#stop").click()
        await until(lambda: not stack.engine.requests)
        await expect(page.locator("#status")).to_have_text("Stopped.")
        shown = await page.locator("article.assistant > .text").text_content() or ""
        assert "word " * 1000 > shown > "word word"
        await ask(page, "more")
        await expect(page.locator("article")).to_have_count(4)
        await page.locator("#clear").click()
        await until(lambda: not stack.engine.requests)
        await has_answer(page)


async def test_whatever_the_model_says_is_shown_as_text_and_reasoning_is_folded(browser: Browser) -> None:
    async with opened(browser, {"": f"<think>{HOSTILE}1</think>{HOSTILE}2"}) as (_, watched):
        page = watched.page
        await ask(page, f"{HOSTILE}0")
        await has_answer(page, f"{HOSTILE}0", f"{SHOWN}2")
        await expect(page.locator(".reasoning .text")).to_be_hidden()
        await page.locator(".reasoning summary").click()
        await expect(page.locator(".reasoning .text")).to_have_text(f"{HOSTILE}1")
        assert await page.evaluate(FOUND) == [None, 0, 3, 0]


async def test_markup_in_one_piece_is_text_too_wherever_the_server_says_it(browser: Browser) -> None:
    async with opened(browser, {"": "Hi."}) as (_, watched):
        page = watched.page
        chunks = [
            {"choices": [{"delta": {"reasoning_content": f"{HOSTILE}1"}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": f"{HOSTILE}2"}, "finish_reason": None}]},
            {"error": {"message": f"{HOSTILE}3"}},
        ]
        stream = f": {HOSTILE}0\n\n" + "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        await page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": HOSTILE}]}))
        await page.route("**/v1/chat/completions", streamed(stream))
        await page.reload()
        await ask(page, "hello")
        await has_answer(page, "hello", f"{SHOWN}2")
        await expect(page.locator(".reasoning .text")).to_have_text(f"{HOSTILE}1")
        await expect(page.locator("#status")).to_have_text(f"{HOSTILE}3")
        await expect(page.locator("article.assistant h2")).to_have_text(HOSTILE)
        assert await page.evaluate(FOUND) == [None, 0, 3, 0]


async def test_the_policy_stops_what_would_come_in_all_the_same(browser: Browser) -> None:
    async with opened(browser, {"": "Hi."}) as (_, watched):
        page = watched.page
        await ask(page, "hello")
        await has_answer(page, "hello", "Hi.")
        await page.evaluate(f"document.getElementById('conversation').innerHTML = `{HOSTILE}`")
        await page.evaluate("fetch('http://127.0.0.2:1/').catch(() => 0)")
        rules = ("script-src", "img-src", "connect-src")
        await until(lambda: all(any(rule in text for text in watched.complaints) for rule in rules))
        assert await page.evaluate("window.wasRun") is None
        watched.complaints.clear()
        watched.foreign_urls.clear()


async def test_an_answer_is_markdown_that_can_be_copied_and_loads_and_runs_nothing(browser: Browser) -> None:
    code = 'print("<b>")'
    answer = f"""# Title\n\n- **one** `two`\n- [good](https://octavo.example/?a=1&b=2) [bad](javascript:wasRun=1)
- [here](/v1/models) ![seen](https://octavo.example/x.png) [data](data:text/html,<script>wasRun=1</script>)\n
| a | b |\n|---|---|\n| c<br>d | <form action=x id=question> |\n\n```python\n{code}\n```\n
<div style="color: red" onclick=wasRun=1>\n<svg onload=wasRun=1><style>*{{display:none}}</style>\n</div>\n\nEnd."""
    async with opened(browser, {"": answer}) as (_, watched):
        page = watched.page
        text = page.locator("article.assistant").last.locator(".text")
        await ask(page, "hello")
        await expect(text.locator("p").last).to_have_text("End.")
        await expect(text.locator("h1, li strong, li code, td br")).to_have_count(4)
        links = await text.locator("a").evaluate_all("all => all.map((a) => [a.text, a.getAttribute('href'), a.rel])")
        assert [link for link in links if link[1]] == [
            ["good", "https://octavo.example/?a=1&b=2", "noopener noreferrer"],
            ["seen", "https://octavo.example/x.png", "noopener noreferrer"],
        ]
        assert {link[0] for link in links if not link[1]} == {"bad", "here", "data"}
        await expect(text).to_contain_text("<svg onload=wasRun=1><style>*{display:none}</style>")
        assert await text.locator("img, svg, form, style, script, [style], [id], [onclick]").count() == 0
        await text.locator("a").nth(1).click()
        assert await page.evaluate(FOUND) == [None, 0, 3, 0]

        for copied, button in ((code, text.locator("pre + button")), (answer, page.locator("article > button").last)):
            await button.click()
            await page.locator("#question").fill("")
            await page.locator("#question").press("Control+V")
            await expect(page.locator("#question")).to_have_value(copied)
        for deep in (">" * 20_000, "[![" * 3000, "**a " * 5000):
            chunk = {"choices": [{"delta": {"content": deep}, "finish_reason": "stop"}]}
            await page.route("**/v1/chat/completions", streamed(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"))
            await ask(page, "deep")
            await expect(page.locator("#status")).to_have_text("0 tokens")
            await expect(text).to_have_text(deep)


async def test_a_question_can_be_edited_and_the_conversation_stays_until_it_is_cleared(browser: Browser) -> None:
    async with opened(browser, {"": "Hi.", "two": "**Two.**", "three": "Three."}) as (_, watched):
        page = watched.page
        for question in ("one", "two"):
            await ask(page, question)
            await expect(page.locator("#status")).to_contain_text("tokens")
        await has_answer(page, "one", "Hi.", "two", "Two.")
        await page.reload()
        await has_answer(page, "one", "Hi.", "two", "Two.")
        await page.locator("article.user button").first.click()
        await expect(page.locator("#question")).to_have_value("one")
        await page.keyboard.press("Escape")
        await expect(page.locator("#question")).to_have_value("")
        await page.locator("article.user button").first.click()
        await expect(page.locator("#question")).to_be_focused()
        await page.keyboard.type(" three")
        await page.locator("#send").click()
        await has_answer(page, "one three", "Three.")
        await expect(page.locator("#question")).to_be_focused()
        await watched.open("/v1/models")
        await page.evaluate("localStorage.setItem('octavo-conversation', '[{}, 7')")
        await watched.open()
        await has_answer(page)
        await ask(page, "two")
        await has_answer(page, "two", "Two.")
        await page.locator("#clear").click()
        await page.reload()
        await has_answer(page)
        assert await page.evaluate("localStorage.length") == 0


async def test_a_question_that_is_stopped_before_its_answer_is_in_the_box_again(browser: Browser) -> None:
    async with opened(browser, {"": "Hi."}) as (_, watched):
        page = watched.page
        bodies: list[Any] = []
        await page.route("**/v1/chat/completions", lambda route: bodies.append(route.request.post_data_json))
        for stop in (page.keyboard.press, lambda _: page.locator("#stop").click()):
            await ask(page, "hello")
            await expect(page.locator("article.user")).to_have_count(1)
            await stop("Escape")
            await expect(page.locator("#status")).to_have_text("Stopped.")
            await has_answer(page)
            await expect(page.locator("#question")).to_have_value("hello")
            await expect(page.locator("#question")).to_be_focused()
        await page.unroute("**/v1/chat/completions")
        await ask(page, "more")
        await has_answer(page, "more", "Hi.")
        assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "hello"}]] * 2


async def test_a_token_is_asked_for_and_kept_in_this_tab_only(browser: Browser, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("blue the-right-token-of-blue\n")
    tokens.chmod(0o600)
    async with opened(browser, {"": "Hi."}, tokens_file=tokens) as (_, watched):
        page = watched.page
        for token, said in (
            ("", "This server asks for a token."),
            ("wrong-wrong-wrong-wrong", "unknown bearer token; ask the operator for a valid one"),
            ("the-right-token-of-blue", ""),
        ):
            await expect(page.locator("#token")).to_be_focused()
            await page.keyboard.type(token)
            await page.keyboard.press("Enter")
            await expect(page.locator("#status")).to_have_text(said)
        await expect(page.locator("#token-form")).to_be_hidden()
        await ask(page, "hello")
        await has_answer(page, "hello", "Hi.")
        assert await page.evaluate("[Object.keys(localStorage), document.cookie]") == [["octavo-conversation"], ""]
        assert await page.evaluate("Object.values(sessionStorage)") == ["the-right-token-of-blue"]


async def test_what_the_api_refuses_is_said_and_stays_in_the_box_and_out_of_the_conversation(browser: Browser) -> None:
    async with opened(browser, {"": "Hi.", "again": "Hi again."}) as (_, watched):
        page = watched.page
        refused = page.locator("#status.bad")
        await page.locator("summary").click()
        await page.locator("#temperature").fill("-1")
        await ask(page, "hello")
        await expect(refused).to_contain_text("temperature is -1")
        await has_answer(page)
        await expect(page.locator("#question")).to_have_value("hello")
        await page.locator("#temperature").fill("")
        await page.locator("#question").press("Enter")
        await has_answer(page, "hello", "Hi.")

        await page.locator("#temperature").fill("-1")
        for act, left in ((page.locator("#regenerate"), ""), (page.locator("article.user button"), "hello again")):
            await act.click()
            if left:
                await ask(page, left)
            await expect(refused).to_contain_text("temperature is -1")
            await has_answer(page, "hello", "Hi.")
            await expect(page.locator("#question")).to_have_value(left)
        assert watched.num_failed_loads == 3


async def test_it_works_with_tls(browser: Browser, tmp_path: Path) -> None:
    pair = Authority().issue("127.0.0.1").write(tmp_path)
    async with opened(browser, {"": "Hi."}, scheme="https", tls_cert=pair.cert, tls_key=pair.key) as (_, watched):
        await ask(watched.page, "hello")
        await has_answer(watched.page, "hello", "Hi.")

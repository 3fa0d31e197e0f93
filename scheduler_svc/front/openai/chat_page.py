"""The chat page at /, `chat_page.html`: one static file over the API beside it."""

from collections.abc import Mapping
from importlib import resources

from aiohttp import web

from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.http.page import page_with_policy


def chat_page_routes() -> Mapping[str, Route]:
    """Return the page by its path. It holds no data, so it is for anybody; what it calls asks for tokens."""
    html = (resources.files(__package__) / "chat_page.html").read_text(encoding="utf-8")
    page = page_with_policy(html)

    async def show(call: Call) -> web.Response:
        return web.Response(body=page.html, headers={**call.headers, **page.headers})

    return {"/": Route("GET", show, access=Access.ANYBODY, is_page=True)}

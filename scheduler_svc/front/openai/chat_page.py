"""The chat page at /, `chat_page.html` with its scripts inlined: one static document over the API beside it."""

import re
from collections.abc import Mapping
from importlib import resources

from aiohttp import web

from scheduler_svc.front.openai.call import Call
from scheduler_svc.front.openai.routing import Access, Route
from scheduler_svc.http.page import page_with_policy

_SCRIPT_LINK = re.compile(r'(<script[^>]*) src="([^"]+)"></script>')


def chat_page_document() -> str:
    """Return the page; it refers to no other file."""
    folder = resources.files(__package__)

    def inlined(link: re.Match[str]) -> str:
        script = folder.joinpath(link[2]).read_text(encoding="utf-8")
        assert "</script" not in script, f"{link[2]} would end its inline script"
        return f"{link[1]}>{script}</script>"

    return _SCRIPT_LINK.sub(inlined, (folder / "chat_page.html").read_text(encoding="utf-8"))


def chat_page_routes() -> Mapping[str, Route]:
    """Return the page by its path. It holds no data, so anyone may load it; the calls that it makes need tokens."""
    page = page_with_policy(chat_page_document())

    async def show(call: Call) -> web.Response:
        return web.Response(body=page.html, headers={**call.headers, **page.headers})

    return {"/": Route("GET", show, access=Access.ANYBODY, is_page=True)}

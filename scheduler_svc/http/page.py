"""A page of one file, and the policy that lets its own scripts and styles run, and nothing else."""

import base64
import hashlib
from dataclasses import dataclass
from html.parser import HTMLParser


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent.

    Attributes:
        html: UTF-8.
        content_security_policy: Allows the scripts and styles in the file, and calls to its origin, nothing else;
            attributes style= and onclick= are refused too.
    """

    html: bytes
    content_security_policy: str

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer with the page, beyond those of every answer of the port."""
        return {
            "Content-Security-Policy": self.content_security_policy,
            "Content-Type": "text/html; charset=utf-8",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
        }


def page_with_policy(html: str) -> Page:
    """Return a page with a policy that names its scripts and styles by their hashes (CSP Level 3, section 2.3.1)."""
    elements = _InlineElements()
    elements.feed(html)
    elements.close()
    policy = {
        "default-src": ["'none'"],
        "script-src": _hashes(elements.texts["script"]),
        "style-src": _hashes(elements.texts["style"]),
        "img-src": ["data:"],
        "connect-src": ["'self'"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
    }
    text = "; ".join(f"{name} {' '.join(sources)}" for name, sources in policy.items())
    return Page(html.encode(), text)


def _hashes(texts: list[str]) -> list[str]:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return [f"'sha256-{digest}'" for digest in digests] or ["'none'"]


class _InlineElements(HTMLParser):
    """Collects the exact content of script and style elements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.texts:
            self.texts[tag].append("")
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.texts[self._inside][-1] += data

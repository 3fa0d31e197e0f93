"""Bundles the live page: `index.html` with the style and the JavaScript modules beside it inlined, and its policy.

The modules are ordinary ES modules, with imports and exports. They become one inline script, in the order of their
imports; a name that two of them define at the top is a SyntaxError of the browser.
"""

import base64
import hashlib
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib import resources

_STYLE_LINK = '<link rel="stylesheet" href="style.css">'
_SCRIPT_LINK = '<script type="module" src="main.js"></script>'
_ENTRY = "main.js"

# One line each: import { a, b } from "./module.js";
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(?P<module>[a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|class|const|function) )", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent.

    Attributes:
        html: UTF-8.
        content_security_policy: Allows the scripts and styles that are in the file and calls to where it came from,
            nothing else; attributes style= and onclick= are refused too.
    """

    html: bytes
    content_security_policy: str


def load_page() -> Page:
    """Read the page from the package."""
    return page_with_policy(bundle_document())


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


def bundle_document() -> str:
    """Return the page; it refers to no other file."""
    document = _read("index.html")
    for link, inline in (
        (_STYLE_LINK, f"<style>{_read('style.css')}</style>"),
        (_SCRIPT_LINK, f'<script type="module">{_read_script()}</script>'),
    ):
        assert document.count(link) == 1, f"index.html has not exactly one {link}"
        document = document.replace(link, inline)
    return document


def _read_script() -> str:
    """Return the entry module and all that it imports as one script, each module once, behind what it imports."""
    texts: dict[str, str] = {}
    importers: list[str] = []

    def add(module: str) -> None:
        assert module not in importers, f"modules import each other: {' -> '.join([*importers, module])}"
        if module in texts:
            return
        text = _read(module)
        importers.append(module)
        for match in _IMPORT.finditer(text):
            add(match["module"])
        importers.pop()
        texts[module] = _EXPORT.sub("", _IMPORT.sub("", text))

    add(_ENTRY)
    script = "\n".join(texts.values())
    assert "</script" not in script, "it would end the inline script"
    return script


def _read(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hashes(texts: list[str]) -> list[str]:
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return [f"'sha256-{digest}'" for digest in digests] or ["'none'"]


class _InlineElements(HTMLParser):
    """Collects what is inside of script and style elements, to the letter."""

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

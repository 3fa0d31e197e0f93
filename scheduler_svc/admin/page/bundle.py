"""Bundles the live page: `index.html` with the style and the JavaScript modules beside it inlined.

The modules are ordinary ES modules, with imports and exports. They become one inline script, in the order of their
imports; two modules that define one top-level name give a SyntaxError in the browser.
"""

import re
from importlib import resources

from scheduler_svc.http.page import Page, page_with_policy

_STYLE_LINK = '<link rel="stylesheet" href="style.css">'
_SCRIPT_LINK = '<script type="module" src="main.js"></script>'
_ENTRY = "main.js"

# One line each: import { a, b } from "./module.js";
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(?P<module>[a-z_]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|class|const|function) )", re.MULTILINE)


def load_page() -> Page:
    """Read the page from the package."""
    return page_with_policy(bundle_document())


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

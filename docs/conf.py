"""Sphinx's configuration; `make docs` builds the site into docs/_build/html.

Pages are Markdown that a forge shows too, so links between them are what a forge understands: paths of files, relative
to the page. In the site the same links have to work, and there only docs/ is. So the site shows the pages of the
top level as docs/project/*.md (there a page only says where its text is), and every link to a file of the repository
is written anew when a page is read:

- to a page of docs/, or one of the top level: to where the site has it, with its #anchor;
- to another file: as it is, and MyST offers the file as a download;
- to a folder: no link.

Docstrings and the help of commands are not written for Sphinx either: they are turned into reStructuredText here.

Nothing is fetched: no fonts, no scripts, no inventories of other projects.
"""

import inspect
import os
import re
from pathlib import Path, PurePosixPath

import click
from sphinx.application import Sphinx

import octavo

REPOSITORY = Path(__file__).parents[1]

# Pages of the site that show a file of the top level.
SHOWN_FILES = {
    "project/readme": "README.md",
    "project/architecture": "ARCHITECTURE.md",
    "project/contributing": "CONTRIBUTING.md",
    "project/changelog": "CHANGELOG.md",
}
_PAGES_OF_FILES = {file: f"docs/{page}.md" for page, file in SHOWN_FILES.items()}

# Code, where nothing is a link, or a link: its text, its path, its anchor.
_CODE_OR_LINK = re.compile(
    r"(?P<code>^```.*?^```|`+[^`\n]+`+)|\[(?P<text>[^\]\n]*)\]\((?P<path>[^):#\s]+)(?P<anchor>#[^)\s]*)?\)",
    re.DOTALL | re.MULTILINE,
)

project = "Octavo"
version = release = octavo.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_build", "tools"]

myst_heading_anchors = 6  # the anchors that forges give to headings
smartquotes = False  # or -- of a flag would become a dash

html_theme = "furo"
html_title = f"Octavo {release}"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options: dict[str, list[str]] = {"top_of_page_buttons": []}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# Types that no page of the site describes: those of Python and of the libraries.
nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|contextlib|google|grpc|os|pathlib|typing)\..*"),
    ("py:.*", r"octavo\.(admin|generation)\..*"),  # generated from the protos; reference/api.md has them
    ("py:.*", r"octavo\.calls\.streamed_answer\..*"),  # for the package's own modules
    ("py:.*", r"tuple\[str"),  # of "tuple[str, ...]", cut at its comma
    ("py:.*", r"(bool|bytes|float|int|object|str|tuple|list|dict|None|Exception|RuntimeError|ValueError)"),
]


def in_site(file: str, text: str, docname: str) -> str:
    """Return a page as the site needs it.

    Args:
        file: Where the text lies, relative to the repository.
        text: Markdown, whose links are relative to `file`.
        docname: The page that shows it, relative to docs/.
    """
    page_folder = PurePosixPath("docs", docname).parent

    def rewritten(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        target = os.path.normpath(PurePosixPath(file).parent / match["path"])
        if (REPOSITORY / target).is_dir():
            return match["text"]
        path = os.path.relpath(_PAGES_OF_FILES.get(target, target), page_folder)
        return f"[{match['text']}]({path}{match['anchor'] or ''})"

    return _CODE_OR_LINK.sub(rewritten, text)


def _show(_: Sphinx, docname: str, content: list[str]) -> None:
    """Replace what Sphinx has read of a page; `content` has one item."""
    file = SHOWN_FILES.get(docname)
    text = content[0] if file is None else (REPOSITORY / file).read_text(encoding="utf-8")
    content[0] = in_site(file or f"docs/{docname}.md", text, docname)


def _code_as_rst(_: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Write a docstring's code as reStructuredText has it: docstrings have it between single backticks, as Markdown.

    A section Raises may begin on the line of its name. In the docstring of a module an indented block is a picture or a
    program; elsewhere it may be a section.
    """
    del name, obj, options
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", lambda code: f"``{code[1].strip()}``", "\n".join(lines))
    lines[:] = re.sub(r"^Raises: (?=\S)", "Raises:\n    ", text, flags=re.MULTILINE).split("\n")
    if what == "module":
        starts = [at for at in range(1, len(lines)) if lines[at].startswith("    ") and not lines[at - 1].strip()]
        for at in reversed(starts):
            lines[at:at] = ["::", ""]


def _help_as_rst(_: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Write the help of a command, plain text, as reStructuredText, line by line where click keeps the lines."""
    lines.clear()
    for paragraph in inspect.cleandoc(context.command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):
            lines += ["::", "", *(f"   {line}" for line in paragraph.splitlines()[1:]), ""]
        else:
            lines += [re.sub(r"([\\*`|_])", r"\\\1", " ".join(paragraph.split())), ""]


def setup(app: Sphinx) -> None:
    """Have pages, docstrings and help pass through the functions above; Sphinx calls this."""
    app.connect("source-read", _show)
    app.connect("autodoc-process-docstring", _code_as_rst, priority=400)  # before napoleon
    app.connect("sphinx-click-process-description", _help_as_rst)

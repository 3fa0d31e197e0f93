"""The pages of the documentation that are written from the code, and the command that writes them anew.

    python -m docs.tools.reference            write the pages
    python -m docs.tools.reference --check    exit 1 if one of them is not what the code says

A page is a function from what is there now to what should be there: some have only tables from the code.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from docs.tools import (
    api,
    configuration,
    keywords,
    messages_fields,
    metrics,
    openai_fields,
    packages,
    responses_fields,
)

REPOSITORY = Path(__file__).parents[2]

PAGES: Mapping[str, Callable[[str], str]] = {
    "ARCHITECTURE.md": packages.with_table,
    "docs/metrics.md": metrics.with_tables,
    "docs/reference/api.md": api.page,
    "docs/reference/configuration.md": configuration.page,
    "docs/reference/messages-fields.md": messages_fields.page,
    "docs/reference/openai-fields.md": openai_fields.page,
    "docs/reference/responses-fields.md": responses_fields.page,
    "docs/structured-output.md": keywords.with_table,
}


def stale_pages() -> dict[Path, str]:
    """Return what the pages should be that are not what the code says."""
    stale = {}
    for name, page in PAGES.items():
        path = REPOSITORY / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        wanted = page(text)
        if wanted != text:
            stale[path] = wanted
    return stale


def main() -> int:
    """Write the pages or check them; return the exit code."""
    parser = argparse.ArgumentParser(description="Write the reference pages of the documentation from the code.")
    parser.add_argument("--check", action="store_true", help="compare with the committed pages, write nothing")
    is_check = parser.parse_args().check
    stale = stale_pages()
    for path, text in stale.items():
        if is_check:
            print(f"stale: {path} (run `make docs-reference`)", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

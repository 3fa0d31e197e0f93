"""The table of JSON Schema's keywords in docs/structured-output.md, from the code that reads schemas."""

import re

from scheduler_svc.front.grammars.keywords import KEYWORDS

_BEGIN, _END = "<!-- keywords, by make docs-reference -->", "<!-- end -->"


def with_table(page: str) -> str:
    """Return the page with its table, between two comments."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, known in KEYWORDS.items():
        alike.setdefault((known.verdict.value, known.why), []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {verdict} | {why} |" for (verdict, why), names in alike.items()]
    table = "\n".join(["| keyword | | |", "|---|---|---|", *rows, "| `x-…`, any other | a note | an extension |"])
    found = re.search(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", page, re.DOTALL)
    assert found, "the page has no place for the table of keywords"
    return f"{page[: found.start()]}{_BEGIN}\n\n{table}\n\n{_END}{page[found.end() :]}"

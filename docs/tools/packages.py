"""The table of packages in ARCHITECTURE.md, from the import contract of pyproject.toml that layers all of them."""

import ast
import re
import tomllib
from pathlib import Path

_REPOSITORY = Path(__file__).parents[2]
_BEGIN, _END = "<!-- packages, by make docs-reference -->", "<!-- end -->"


def with_table(page: str) -> str:
    """Return the page with the table of packages between its two comments."""
    found = re.search(f"{_BEGIN}.*?{_END}", page, re.DOTALL)
    assert found, "the page has no place for the table of packages"
    return f"{page[: found.start()]}{_BEGIN}\n\n{table()}\n\n{_END}{page[found.end() :]}"


def table() -> str:
    """Return the layers of that contract, the upper ones first, and what each package is by its docstring."""
    project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = project["tool"]["importlinter"]["contracts"]
    [layers] = [
        contract["layers"] for contract in contracts if contract["type"] == "layers" and "containers" not in contract
    ]
    lines = ["| layer | package | what it is |", "|---:|---|---|"]
    for number, layer in zip(range(len(layers), 0, -1), layers, strict=True):
        lines += [f"| {number} | `{package}` | {_summary(package)} |" for package in re.split(r" [:|] ", layer)]
    return "\n".join(lines)


def _summary(package: str) -> str:
    """Return the first line of a package's or module's docstring; what has none is generated."""
    path = package.replace(".", "/")
    names = [f"{root}{path}{end}" for root in ("", "shared/") for end in (".py", "/__init__.py")]
    [source] = [_REPOSITORY / name for name in names if (_REPOSITORY / name).is_file()]
    docstring = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8")))
    return docstring.splitlines()[0] if docstring else "Stubs, from `protos/`."

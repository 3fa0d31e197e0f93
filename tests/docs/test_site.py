"""The site that Sphinx builds: without a warning, complete, and fetching nothing."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.conf import SHOWN_FILES, in_site
from tests.docs.pages import REPOSITORY, pages


class Fetched(HTMLParser):
    """Collects what a browser fetches by itself to show a page; links that a person follows are not."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name in {"src", "srcset", "poster", "data"} or (tag == "link" and name == "href")):
                self.urls.append(value)
            if value and name == "style":
                self.urls += re.findall(r"url\(([^)]*)\)", value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make docs` does."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", "-d", str(site / ".doctrees")]
    run = subprocess.run([*command, "docs", str(site)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return site


@pytest.mark.slow
def test_every_page_is_in_the_site(site: Path) -> None:
    for page in pages():
        if page.startswith("docs/"):
            assert (site / page.removeprefix("docs/")).with_suffix(".html").exists(), page


@pytest.mark.slow
def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    found = []
    for path in site.rglob("*.html"):
        parser = Fetched()
        parser.feed(path.read_text(encoding="utf-8"))
        assert parser.urls, f"{path} has no style sheet"
        found += [f"{path.name}: {url}" for url in parser.urls if re.match(r"(https?:)?//", url)]
    for path in site.rglob("*.css"):
        style = path.read_text(encoding="utf-8")
        found += [
            f"{path.name}: {url}" for url in re.findall(r"(?:@import\s+|url\()['\"]?((?:https?:)?//[^'\")]+)", style)
        ]
    assert found == []


@pytest.mark.slow
def test_pages_of_the_top_level_are_shown_with_links_into_the_site(site: Path) -> None:
    shown = (site / "project" / "architecture.html").read_text(encoding="utf-8")
    assert "Life of a step" in shown
    security = (site / "security.html").read_text(encoding="utf-8")
    assert 'href="project/architecture.html#order-of-admission"' in security


def test_links_are_written_anew_for_the_site() -> None:
    def shown(text: str) -> str:
        return in_site("docs/security.md", text, "security")

    assert shown("[a](../ARCHITECTURE.md#ports)") == "[a](project/architecture.md#ports)"
    assert shown("[a](metrics.md)") == "[a](metrics.md)"
    assert shown("[a](../Makefile) and [b](../k8s)") == "[a](../Makefile) and b"
    assert shown("[a](https://example.com/x) [b](#here)") == "[a](https://example.com/x) [b](#here)"
    assert (
        shown("`[a](../README.md)`\n```\n[a](../README.md)\n```") == "`[a](../README.md)`\n```\n[a](../README.md)\n```"
    )
    assert in_site("README.md", "[a](docs/metrics.md#x)", "project/readme") == "[a](../metrics.md#x)"


def test_every_page_of_the_top_level_has_a_place_in_the_site() -> None:
    assert sorted(SHOWN_FILES.values()) == [page for page in pages() if "/" not in page]

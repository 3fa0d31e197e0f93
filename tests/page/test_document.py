"""The page is one document: its modules and its style are in it, and it refers to nothing else."""

import re
from importlib import resources

from scheduler_svc.admin.page.bundle import bundle_document

PAGE = resources.files("scheduler_svc.admin.page")
PARTS = [part for part in PAGE.iterdir() if part.is_file() and not part.name.endswith(".py")]


def test_every_file_of_the_page_is_in_the_document() -> None:
    document = bundle_document()

    assert len(PARTS) > 10
    for part in PARTS:
        first_line = part.read_text(encoding="utf-8").splitlines()[0]
        assert document.count(first_line) == 1, part.name


def test_the_document_refers_to_nothing_else() -> None:
    document = bundle_document()

    assert re.findall(r"^(?:import|export)\b.*", document, re.MULTILINE) == []
    assert [link for link in re.findall(r'(?:src|href)="([^"]*)"', document) if not link.startswith("data:")] == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+|url\(|@import", document) == []


def test_nothing_on_the_page_is_made_of_markup_that_comes_from_elsewhere() -> None:
    assert re.findall(r"\.innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", bundle_document()) == []

"""The pictures of the documentation show something and are small; that of the page can be taken at any time."""

from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import Browser

from tests.page.killed_executor import COMMANDS, DOCUMENT, FIGURES, REQUEST_ID, with_block
from tests.page.screenshot import PICTURE, take_picture
from tests.support.each_row import each_row

MAX_BYTES = 300_000


def shares_of_colours(path: Path) -> list[float]:
    """Return which share of a picture each colour has, the largest first."""
    with Image.open(path) as picture:
        colours = picture.convert("RGB").getcolors(picture.width * picture.height)
        assert colours is not None
        return sorted((number / (picture.width * picture.height) for number, _ in colours), reverse=True)


@pytest.mark.slow  # test_failures.py and others have the page
@pytest.mark.asyncio(loop_scope="session")
async def test_a_new_picture_is_not_blank(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    await take_picture(browser, path, step_ms=6.0)

    shares = shares_of_colours(path)
    assert len(shares) > 100
    assert shares[0] < 0.8
    assert path.stat().st_size < MAX_BYTES


@each_row(*sorted(PICTURE.parent.glob("*.png")))
def test_a_picture_of_the_documentation_is_not_blank(path: Path) -> None:
    assert shares_of_colours(path)[0] < 0.8
    assert path.stat().st_size < MAX_BYTES


def test_the_page_of_the_killed_executor_has_the_texts_of_its_script() -> None:
    document = DOCUMENT.read_text(encoding="utf-8")
    for block, command in COMMANDS.items():
        assert f"<!-- {block} -->\n```console\n$ {command}\n" in with_block(document, block, "anything")
    top = (FIGURES / "killed-executor-top.svg").read_text(encoding="utf-8")
    assert "not&#160;attached" in top
    assert REQUEST_ID in top

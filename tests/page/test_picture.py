"""The picture of the documentation can be taken at any time, and shows something."""

from pathlib import Path

import pytest
from PIL import Image
from playwright.async_api import Browser

from tests.page.screenshot import PICTURE, take_picture

MAX_BYTES = 300_000


def shares_of_colours(path: Path) -> list[float]:
    """Return which share of a picture each colour has, the largest first."""
    with Image.open(path) as picture:
        colours = picture.convert("RGB").getcolors(picture.width * picture.height)
        assert colours is not None
        return sorted((number / (picture.width * picture.height) for number, _ in colours), reverse=True)


@pytest.mark.asyncio(loop_scope="session")
async def test_a_new_picture_is_not_blank(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    await take_picture(browser, path, step_ms=6.0)

    shares = shares_of_colours(path)
    assert len(shares) > 100
    assert shares[0] < 0.8
    assert path.stat().st_size < MAX_BYTES


def test_the_picture_of_the_documentation_is_not_blank() -> None:
    assert shares_of_colours(PICTURE)[0] < 0.8
    assert PICTURE.stat().st_size < MAX_BYTES

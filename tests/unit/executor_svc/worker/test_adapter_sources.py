"""Which paths the source of an adapter may stand for."""

from pathlib import Path

import pytest

from executor_svc.worker.adapter_sources import AdapterSources
from octavo_shared.errors import ModelLoadError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "allowed" / "deep").mkdir(parents=True)
    for name in ("secret", "allowed/a", "allowed/deep/b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "allowed" / "out").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed" / "in").symlink_to("deep/b")
    (tmp_path / "allowed" / "circle").symlink_to("circle")
    return tmp_path / "allowed"


@pytest.mark.parametrize(("source", "found"), [("a", "a"), ("deep/../a", "a"), ("in", "deep/b"), ("deep/b", "deep/b")])
def test_paths_in_the_folder_are_found(source: str, found: str, folder: Path) -> None:
    assert AdapterSources([folder]).find(source) == folder / found
    assert AdapterSources([folder]).find(str(folder / source)) == folder / found


@pytest.mark.parametrize(
    "source",
    ["../secret", "out", "circle", "", ".", "..", "/etc/passwd", "deep/../../secret", "none", "a\0", "x" * 5000],
)
def test_nothing_else_is_found(source: str, folder: Path) -> None:
    with pytest.raises(ModelLoadError):
        AdapterSources([folder]).find(source)


def test_a_name_is_found_wherever_it_lies(folder: Path) -> None:
    sources = AdapterSources(named={"it": folder.parent / "secret"})
    assert sources.read("it") == b"secret"
    circle = AdapterSources(named={"it": folder / "circle"})
    with pytest.raises(ModelLoadError, match="cannot be found"):
        circle.find("it")
    with pytest.raises(ModelLoadError, match="is no name of --lora, and no path in the folders of --lora-dir"):
        sources.find("other")

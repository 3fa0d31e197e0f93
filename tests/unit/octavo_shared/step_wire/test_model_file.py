"""What a model directory holds is read from there, and from nowhere else: no link publishes another file."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.checkpoint.model_directory import ModelDirectory
from octavo_shared.errors import ModelLoadError, TokenizerFileError
from octavo_shared.step_wire.model_file import read_model_file
from scheduler_svc.front.text.text_model import ModelTokenizer
from tests.support.tokenizers import byte_level_backend

COMMIT = Path("hub/models--org--tiny/snapshots", "0" * 40)

# The directory, its file, where its link points to; all relative to a folder.
INSIDE: list[tuple[str, Path, str]] = [
    ("a file", Path("tiny"), ""),
    ("a link beside it", Path("tiny"), "other.json"),
    ("Kubernetes", Path("tiny"), "..data/config.json"),
    ("the hub's cache", COMMIT, "../../blobs/1234"),
    ("the hub's shared store", COMMIT, "../../../blobs/12/1234"),
]
OUTSIDE: list[tuple[str, Path, str]] = [
    ("a neighbour", Path("tiny"), "../key"),
    ("a name that begins alike", Path("tiny"), "../tiny-key"),
    ("an absolute one", Path("tiny"), "{}/key"),
    ("a link in a link", Path("tiny"), "other/key"),
    ("the token beside the hub's cache", COMMIT, "../../../../token"),
    ("another model of the cache", COMMIT, "../../../models--org--other/blobs/1234"),
    ("no cache of the hub", Path("models--org--tiny/0000"), "../blobs/1234"),
]


def link(root: Path, directory: Path, target: str) -> Path:
    """Make a directory whose config.json leads to another file; return its path."""
    path = root / directory / "config.json"
    path.parent.mkdir(parents=True)
    (path.parent / "..2026").mkdir()
    (path.parent / "..data").symlink_to("..2026")
    (path.parent / "other").symlink_to(root)
    if not target:
        path.write_bytes(b"{}")
        return path
    (path.parent / target.format(root)).parent.mkdir(parents=True, exist_ok=True)
    (path.parent / target.format(root)).write_bytes(b"{}")
    path.symlink_to(target.format(root))
    return path


@pytest.mark.parametrize(("directory", "target"), [row[1:] for row in INSIDE], ids=[row[0] for row in INSIDE])
def test_a_link_in_the_directory_or_in_its_cache_is_followed(directory: Path, target: str, tmp_path: Path) -> None:
    path = link(tmp_path, directory, target)

    assert read_model_file(path) == b"{}"
    (tmp_path / "model").symlink_to(path.parent)  # the directory itself may be a link
    assert read_model_file(tmp_path / "model" / "config.json") == b"{}"


@pytest.mark.parametrize(("directory", "target"), [row[1:] for row in OUTSIDE], ids=[row[0] for row in OUTSIDE])
def test_a_link_out_of_the_directory_is_refused(directory: Path, target: str, tmp_path: Path) -> None:
    path = link(tmp_path, directory, target)
    real = path.resolve()

    with pytest.raises(ModelLoadError) as caught:
        ModelDirectory(path.parent).config()
    assert str(caught.value) == (
        f"{path} cannot be read: it is a symbolic link to {real}, outside the model directory; put the file itself "
        "there"
    )


def test_what_would_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")

    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read: it is not a regular file"):
        ModelDirectory(tmp_path).config()


DOORS: list[tuple[str, Callable[[Path], object], type[Exception]]] = [
    ("config.json", lambda path: ModelDirectory(path).config(), ModelLoadError),
    ("generation_config.json", lambda path: ModelDirectory(path).sampling_defaults(), ModelLoadError),
    *(
        (name, lambda path: ModelDirectory(path).tokenizer_files(), ModelLoadError)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    ),
    *(
        (name, ModelTokenizer, TokenizerFileError)
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    ),
]


@pytest.mark.parametrize(("name", "read", "error"), DOORS)
def test_executor_and_scheduler_refuse_each_file_that_is_a_link_to_a_key(
    name: str, read: Callable[[Path], object], error: type[Exception], tmp_path: Path
) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "tokenizer.json").write_text(byte_level_backend().to_str())
    (tmp_path / "key").write_text("secret")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("../key")

    with pytest.raises(
        error, match=(f"{name}.* cannot be read: it is a symbolic link to {tmp_path}/key, outside")
    ) as caught:
        read(directory)
    assert "secret" not in str(caught.value)

"""The directory of the sockets: private, removed at the end, and by the next process after a kill."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo_shared.errors import UnavailableError
from scheduler_svc.admin.listener.socket_directory import socket_directory

# A process that is ended without a chance to clean up.
KILLED = """
import os, signal, sys, tempfile
tempfile.tempdir = sys.argv[1]
from scheduler_svc.admin.listener.socket_directory import socket_directory
with socket_directory():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("scheduler_svc.admin.listener.socket_directory._MAX_PARENT_BYTES", 1000)
    return tmp_path


def test_it_is_private_and_goes_with_what_is_in_it(parent: Path) -> None:
    with socket_directory() as directory:
        assert directory.parent == parent
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "grpc").touch()
    assert not list(parent.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(parent: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(parent)], check=False, cwd=Path(__file__).parents[4])
    [left] = parent.iterdir()
    with socket_directory():
        assert left.exists(), "it may be of a process that has just started"
    os.utime(left, (0, 0))
    with socket_directory():
        assert not left.exists()


def test_what_a_live_process_has_is_left_alone(parent: Path) -> None:
    with socket_directory() as first:
        os.utime(first, (0, 0))
        with socket_directory() as second:
            assert {first, second} == set(parent.iterdir())
        assert list(parent.iterdir()) == [first]


def test_what_others_have_is_left_alone(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [parent / "octavo-sockets-file", parent / "octavo-sockets-folder", parent / "octavo-else"]
    others[0].touch()
    for folder in others[1:]:
        folder.mkdir()
        (folder / "lock").touch()
        os.utime(folder, (0, 0))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with socket_directory():
        pass
    assert set(parent.iterdir()) == set(others)


def test_a_path_that_is_too_long_for_sockets_is_not_taken(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_svc.admin.listener.socket_directory._MAX_PARENT_BYTES", len(str(parent)) - 1)
    with socket_directory() as directory:
        assert directory.parent == Path("/tmp")


def test_no_place_for_it_is_one_sentence(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(parent / "nowhere"))
    with pytest.raises(UnavailableError) as caught, socket_directory():
        pass
    assert str(caught.value).endswith("; set TMPDIR to a directory where this user may write")

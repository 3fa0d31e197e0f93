"""A release is recorded without torch, without what nobody imports, and the same way each time."""

import io
import zipfile
from pathlib import Path

from tests.skew.peers import RELEASE_ARCHIVES
from tests.skew.record_release import NO_TIME, needed_sources, version_of, zip_release
from tests.support.each_row import each_row

SOURCES = {
    "octavo/__init__.py": b"if TYPE_CHECKING:\n    import executor_svc.heavy\n__version__ = '7.8.9'\n",
    "octavo/client.py": b"from octavo.inner.v1 import a_pb2\n\ndef late():\n    from octavo_shared import wire\n",
    "octavo/inner/__init__.py": b"",
    "octavo/inner/v1/__init__.py": b"",
    "octavo/inner/v1/a_pb2.py": b"",
    "octavo/inner/v1/b_pb2.py": b"",
    "octavo_shared/__init__.py": b"",
    "octavo_shared/wire.py": b"import octavo_shared.step as step\n",
    "octavo_shared/step.py": b"from octavo_shared.wire import encode\n",
    "executor_svc/heavy.py": b"import torch\n",
}


def test_what_is_recorded_is_what_the_roots_import_at_any_time_but_for_type_checkers() -> None:
    unneeded = {"octavo/inner/v1/b_pb2.py", "executor_svc/heavy.py"}
    assert set(needed_sources(SOURCES, ("octavo.client",))) == set(SOURCES) - unneeded


def test_equal_sources_give_equal_archives_whatever_their_order() -> None:
    backwards = dict(reversed(SOURCES.items()))
    assert zip_release(SOURCES, "abc") == zip_release(backwards, "abc")
    with zipfile.ZipFile(io.BytesIO(zip_release(SOURCES, "abc"))) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == SOURCES
        assert {entry.date_time for entry in archive.infolist()} == {NO_TIME}
        assert archive.comment == b"abc"


@each_row(*RELEASE_ARCHIVES)
def test_a_recorded_release_is_small_and_named_by_its_version_and_commit(recorded: Path) -> None:
    with zipfile.ZipFile(recorded) as archive:
        version = version_of({"octavo/__init__.py": archive.read("octavo/__init__.py")})
        assert archive.testzip() is None
        assert len(bytes.fromhex(archive.comment.decode())) == 20
    assert recorded.name == f"octavo-{version}.zip"
    assert recorded.stat().st_size < 2**20

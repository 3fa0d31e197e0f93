"""`python -m tests.k8s.checkov_check CHECKOV`: checkov finds nothing, and finds what is planted.

Apart from pytest, because checkov pins what other packages need newer, and takes long to start.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.manifests import OVERLAYS, REPOSITORY, Object, overlay

# What we do otherwise, on purpose.
SKIPPED = {
    "CKV_K8S_11": "no CPU limits: throttling a scheduler or a host thread costs every stream, and requests are shares",
    "CKV_K8S_15": "images have versions, which are not published twice",
    "CKV_K8S_43": "digests are of a registry; the overlay of an installation sets them",
    "CKV_DOCKER_2": "Kubernetes probes; OCI images have no HEALTHCHECK",
}


def main() -> int:
    """Return 0 if nothing is found where nothing is wrong, and each planted mistake is."""
    checkov = sys.argv[1]
    failed = False
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for overlay_name in OVERLAYS:
            path = work / f"{overlay_name}.yaml"
            path.write_text(yaml.safe_dump_all(overlay(overlay_name).objects), encoding="utf-8")
            failed |= not _expect(checkov, overlay_name, "kubernetes", path, set())
        for path in sorted((REPOSITORY / "images").glob("*.Containerfile")):
            failed |= not _expect(checkov, path.name, "dockerfile", _as_dockerfile(work, path.read_text()), set())
        planted = work / "planted.yaml"
        planted.write_text(yaml.safe_dump_all(_privileged(overlay("cpu-demo").objects)), encoding="utf-8")
        failed |= not _expect(checkov, "a privileged container", "kubernetes", planted, {"CKV_K8S_16"})
        text = (REPOSITORY / "images/scheduler.Containerfile").read_text().replace("USER 65532:65532", "USER root")
        failed |= not _expect(checkov, "an image of root", "dockerfile", _as_dockerfile(work, text), {"CKV_DOCKER_8"})
    return int(failed)


def _as_dockerfile(work: Path, text: str) -> Path:
    base = re.search(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    assert base is not None
    path = work / "Dockerfile"
    path.write_text(text.replace("${BASE}", base[1]), encoding="utf-8")
    return path


def _privileged(objects: Any) -> list[Object]:
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet"):
            item["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    return list(objects)


def _expect(checkov: str, what: str, framework: str, path: Path, expected: set[str]) -> bool:
    command = [checkov, "--file", str(path), "--framework", framework, "--output", "json", "--quiet", "--compact"]
    command += ["--skip-download", "--skip-check", ",".join(SKIPPED)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    report = json.loads(run.stdout)
    found = {item["check_id"] for item in report.get("results", {}).get("failed_checks", [])}
    passed = report.get("summary", report)["passed"]
    print(f"{what}: {passed} passed, found {', '.join(sorted(found)) or 'nothing'}")
    return found == expected and passed > 0


if __name__ == "__main__":
    sys.exit(main())

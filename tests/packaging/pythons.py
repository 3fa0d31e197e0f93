"""`python -m tests.packaging.pythons [VERSION...]`: the quick part of the suite on every Python that we name.

Each has a virtual environment of its own, .venv-pythonVERSION, made by install.sh, so its torch is the one that people
get there. A version is looked for in PATH, as pythonVERSION, and then with uv, which fetches what is missing.
Ends with 1 if a version cannot be had, or if its tests fail.
"""

import os
import shutil
import subprocess
import sys

from tests.packaging.resolve_check import REPOSITORY, UV, pythons

# Without the processes of tests/e2e, and without the kernels, which no version of Python changes.
QUICK = ("tests/unit", "tests/contract", "tests/property", "tests/traces", "tests/page")
PYTEST = ("-m", "pytest", "-q", "--numprocesses", os.environ.get("TEST_WORKERS", "2"), "--dist", "loadfile")
NOT = ("-m", "not slow and not further_case and not gpu")


def find_python(version: str) -> str | None:
    """Return an interpreter of a version, such as 3.12, that works."""
    candidates = [shutil.which(f"python{version}")]
    found = subprocess.run([UV, "python", "find", version], capture_output=True, text=True, check=False)
    candidates.append(found.stdout.strip() if found.returncode == 0 else None)
    for candidate in filter(None, candidates):
        check = [candidate, "-c", f"import sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')"]
        if subprocess.run(check, check=False, capture_output=True).returncode == 0:
            return candidate
    return None


def run_suite(version: str) -> str:
    """Run the quick part on one version; return what is wrong, or nothing."""
    folder = REPOSITORY / f".venv-python{version}"
    python = find_python(version)
    if python is None:
        return f"no python{version} here; uv python install {version}, or pyenv, brings one"
    environment = {**os.environ, "PYTHON": python, "VENV": str(folder)}
    if subprocess.run([REPOSITORY / "install.sh", "dev"], env=environment, check=False).returncode != 0:
        return "does not install"
    tests = [str(folder / "bin" / "python"), *PYTEST, *NOT, *QUICK]
    return "" if subprocess.run(tests, cwd=REPOSITORY, check=False).returncode == 0 else "its tests fail"


def main(versions: list[str]) -> int:
    """Return 0 if all versions pass; one after the other, for each takes both cores and gigabytes."""
    faults = {version: fault for version in versions or pythons() if (fault := run_suite(version))}
    for version, fault in faults.items():
        print(f"pythons: {version}: {fault}", file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

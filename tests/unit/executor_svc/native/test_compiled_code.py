"""The digest of compiled code: what computes otherwise has another one, what only reads otherwise has not."""

from pathlib import Path

import pytest

from executor_svc.native.build import FLAGS, build_library
from executor_svc.native.compiled_code import code_digest

SOURCE = """
static const double table[3] = {1.0, 2.5, 4.0};
double total(double a, long i) { return a * a + table[i]; }
"""


@pytest.fixture
def digest(tmp_path: Path) -> "Digest":
    return Digest(tmp_path)


class Digest:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, source: str = SOURCE, *flags: str) -> str:
        sources = self._directory / "csrc"
        sources.mkdir(exist_ok=True)
        (sources / "one.c").write_text(source)
        return code_digest(build_library(self._directory, flags=(*FLAGS, *flags), sources=sources))


def test_another_operation_constant_or_flag_is_other_code(digest: Digest) -> None:
    plain = digest(SOURCE, "-ffp-contract=off")

    assert digest(SOURCE.replace("+", "-"), "-ffp-contract=off") != plain
    assert digest(SOURCE.replace("2.5", "2.25"), "-ffp-contract=off") != plain
    assert digest(SOURCE, "-ffp-contract=fast") != plain


def test_comments_symbols_and_notes_are_no_code(digest: Digest) -> None:
    plain = digest()

    assert digest(f"// Adds.\n{SOURCE}") == plain
    assert digest(SOURCE.replace("table", "numbers")) == plain
    assert digest(SOURCE, "-g") == plain
    assert digest(SOURCE, "-Wl,--build-id=none") == plain

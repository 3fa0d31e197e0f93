"""What generation_config.json says of sampling is taken if a request could say it too; the rest is named in the log."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from executor_svc.checkpoint.model_directory import ModelDirectory, sampling_defaults
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row

SETTINGS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 3,
}


def read(**config: Any) -> dict[str, float]:
    return sampling_defaults(config, Path("generation_config.json"))


def test_what_the_model_sets_is_read_and_the_rest_is_not() -> None:
    others = {"max_new_tokens": 2048, "eos_token_id": 2, "presence_penalty": 1.0, "n": 3, "min_tokens": 5, "seed": 1}

    assert read(**SETTINGS, **others, do_sample=True) == SETTINGS


@each_row((False, 0), (True, 0.6), (None, 0.6))
def test_a_model_that_does_not_sample_is_greedy(do_sample: bool | None, temperature: float) -> None:
    assert read(temperature=0.6, do_sample=do_sample) == {"temperature": temperature}


def test_null_sets_nothing() -> None:
    assert read(temperature=None, top_p=None) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", math.nan),
        ("temperature", 10**400),
        ("temperature", "warm"),
        ("temperature", True),
        ("temperature", [0.5]),
        ("top_k", -1),
        ("top_k", 20.5),
        ("top_p", 0),
        ("top_p", {}),
        ("repetition_penalty", 0.0),
        ("no_repeat_ngram_size", 65),
    ],
)
def test_what_no_request_may_have_is_left_out_and_named(
    field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(**{"min_p": 0.5, field: value}) == {"min_p": 0.5}

    [record] = caplog.records
    assert "model_default_ignored" in record.getMessage()
    assert f"field={field}" in record.getMessage()


def test_a_directory_without_the_file_sets_nothing(tmp_path: Path) -> None:
    assert ModelDirectory(tmp_path).sampling_defaults() == {}


def test_the_file_of_a_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(SETTINGS))

    assert ModelDirectory(tmp_path).sampling_defaults() == SETTINGS


@each_row(("{", "is not valid JSON"), ("[]", "does not contain a JSON object"))
def test_a_damaged_file_is_refused_in_one_sentence(content: str, reason: str, *, tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content)

    with pytest.raises(ModelLoadError, match=f"^{path} {reason}"):
        ModelDirectory(tmp_path).sampling_defaults()

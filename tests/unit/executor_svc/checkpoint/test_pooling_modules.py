"""What the files of sentence-transformers say of pooling, and which of it is refused by name."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from executor_svc.checkpoint.pooling_modules import PoolingModules, read_pooling_modules
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.model_file import read_model_file
from tests.support.each_row import each_row

TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
NORMALIZE = {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"}
DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "word_embedding_dimension": 384}


def read(modules: object, pooling: Any = MEAN, max_tokens: object = None) -> PoolingModules | None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_tokens}))
        return read_pooling_modules(directory)


@each_row(
    ([TRANSFORMER, POOLING, NORMALIZE], MEAN, 256, PoolingModules("mean", is_normalized=True, max_tokens=256)),
    ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, None, PoolingModules("cls", is_normalized=False)),
    ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, None, PoolingModules("last", is_normalized=False)),
)
def test_what_modules_say(modules: object, pooling: object, max_tokens: object, expected: PoolingModules) -> None:
    assert read(modules, pooling, max_tokens) == expected


def test_a_directory_without_modules_says_nothing(tmp_path: Path) -> None:
    assert read_pooling_modules(tmp_path) is None


@each_row(
    ({}, MEAN, "modules.json does not contain a list of modules"),
    ([TRANSFORMER], MEAN, "modules.json has no module that pools"),
    ([{"path": ""}], MEAN, "modules.json has a module without a type"),
    ([TRANSFORMER, POOLING, DENSE], MEAN, "has the module sentence_transformers.models.Dense, which is not supported"),
    ([TRANSFORMER, NORMALIZE, POOLING], MEAN, "has the module sentence_transformers.models.Normalize, which is not"),
    ([TRANSFORMER, {**POOLING, "path": "../x"}], MEAN, "has the path '../x'; it must be a folder beside it"),
    ([{**TRANSFORMER, "path": "0"}, POOLING], MEAN, "has its transformer in 0, which is not supported"),
    ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "config.json has pooling_mode_max_tokens; supported"),
    ([TRANSFORMER, POOLING], {**MEAN, "pooling_mode_cls_token": True}, "pooling_mode_cls_token and pooling_mode_mean"),
    ([TRANSFORMER, POOLING], {**MEAN, "include_prompt": False}, "has include_prompt False, which is not supported"),
)
def test_modules_that_are_not_supported_are_refused_by_name(modules: object, pooling: object, words: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        read(modules, pooling)
    assert words in str(refused.value)


def test_a_module_in_the_cache_of_the_hub_is_a_link_to_its_blob_and_no_link_out_of_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    module = repository / "snapshots/0123/1_Pooling"
    module.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs/abc").write_text("{}")
    (module / "config.json").symlink_to("../../../blobs/abc")
    assert read_model_file(module / "config.json") == b"{}"
    (tmp_path / "secret").write_text("no")
    (module / "other.json").symlink_to("../../../../secret")
    with pytest.raises(PermissionError, match="outside the model directory"):
        read_model_file(module / "other.json")

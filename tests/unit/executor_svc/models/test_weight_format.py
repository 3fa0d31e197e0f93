"""The number format of a model: as asked for, else that of the device and of config.json."""

import pytest
import torch

from executor_svc.models.weight_format import Dtype, choose_dtype
from tests.support.each_row import each_row

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("model_config", "capability", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, (9, 0), "bfloat16"),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, (9, 0), "float16"),
        ({"torch_dtype": "torch.float16"}, (9, 0), "float16"),
        ({"torch_dtype": "bfloat16"}, (7, 5), "float16"),
        ({"dtype": "float32", "text_config": {"dtype": "bfloat16"}}, (8, 0), "bfloat16"),
        ({"dtype": "bfloat16", "text_config": {"vocab_size": 7}}, (8, 0), "bfloat16"),
        ({"torch_dtype": "float32"}, (9, 0), "float32"),
        ({"torch_dtype": None}, (9, 0), "float32"),
        ({"torch_dtype": "float64"}, (9, 0), "float32"),
        ({}, (9, 0), "float32"),
    ],
)
def test_a_gpu_computes_in_what_config_json_says(
    model_config: dict[str, object], capability: tuple[int, int], expected: Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    assert choose_dtype("auto", model_config, GPU) == expected
    assert choose_dtype("auto", model_config, CPU) == "float32"


@each_row(CPU, GPU)
def test_what_was_asked_for_wins(device: torch.device) -> None:
    assert choose_dtype("float16", {"torch_dtype": "bfloat16"}, device) == "float16"

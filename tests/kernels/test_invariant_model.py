"""A whole model in Triton: the logits of each position are the same bits however its tokens come to be computed.

The check that `make gpu-check` makes on a device, of tiny models, with a product that adds up rows alike.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.gpu.invariance import Schedule, logits_of, schedules_of
from benchmarks.gpu.models import TINY
from benchmarks.gpu.sizes import REHEARSAL
from tests.kernels.device import DEVICE, SLOW_IF_INTERPRETED
from tests.kernels.products import add_up_rows_alike

ONE_LAYER = {**TINY, "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": ONE_LAYER,
    "qwen3, norms of queries and keys": {
        **ONE_LAYER,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 18,
    },
    "mixtral": {
        **ONE_LAYER,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
}
NUM_TOKENS = 12
WHOLE, *SCHEDULES = schedules_of(NUM_TOKENS, (1, 3))
QUICK = ("qwen3, norms of queries and keys", SCHEDULES[-1])


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        pytest.param(name, schedule, id=f"{name}, {schedule.name}", marks=() if case == QUICK else SLOW_IF_INTERPRETED)
        for name in MODELS
        for schedule in SCHEDULES
        for case in [(name, schedule)]
    ],
)
def test_no_schedule_changes_a_logit(name: str, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    add_up_rows_alike(monkeypatch)
    model, few = MODELS[name], replace(schedule, chunks=[3, 7, 1, 1]) if schedule == QUICK[1] else schedule
    whole = logits_of(model, REHEARSAL, DEVICE, WHOLE, is_invariant=True)

    logits = logits_of(model, REHEARSAL, DEVICE, few, is_invariant=True)

    assert torch.equal(logits, whole)

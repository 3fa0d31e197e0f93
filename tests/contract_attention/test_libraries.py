"""Each library's backend keeps to the library's contract, and attends like the torch backend."""

import json
from collections.abc import Sequence
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_svc.attention.flash_attn_backend import FlashAttention2Backend, FlashAttention3Backend
from executor_svc.attention.installed_libraries import InstalledLibraries
from executor_svc.attention.interface import AttentionBackend, AttentionLayer, AttentionMetadata, LayerCache, Rotation
from executor_svc.attention.key_value_write import RotatedHeads, WriteKeysAndValues, write_in_torch
from executor_svc.attention.rules import AttentionNeeds
from executor_svc.attention.selection import BackendName, choose_backend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.attention.xformers_backend import XformersBackend
from executor_svc.cache.cache_engine import CacheEngine, CacheShape
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.models.kernels import make_model
from executor_svc.models.language_model import LanguageModel
from executor_svc.models.selection import read_model_config
from tests.contract_attention.cases import CASES, DECODES, MIXED, TOLERANCES, WINDOW, decode_batch
from tests.contract_attention.recorded_calls import LIBRARIES, PATH, cases_of, describe, describe_calls
from tests.numerics.attention import LayerInput, Rows, Step
from tests.numerics.tiny_models import save_tiny_model
from tests.support.each_row import each_row

DTYPE = torch.bfloat16


def without_nan(inputs: LayerInput, library: str) -> LayerInput:
    """Version 3 of flash-attn multiplies what windows hide by 0: its cache holds numbers everywhere."""
    if library == "flash_attn 3":
        inputs.keys.nan_to_num_(nan=1e3)
        inputs.values.nan_to_num_(nan=1e3)
    return inputs


def assert_equal_to_torch(
    library: str, inputs: LayerInput, layer: AttentionLayer, **arguments: WriteKeysAndValues
) -> None:
    stand_in, make, *_ = LIBRARIES[library]
    due, due_cache = inputs.attend(TorchAttentionBackend(), layer)
    with stand_in() as calls:
        ours, cache = inputs.attend(make(**arguments), layer)
    assert calls
    assert ours.dtype == inputs.dtype
    tolerance = TOLERANCES[inputs.dtype]
    torch.testing.assert_close(ours, due, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close((cache.keys, cache.values), (due_cache.keys, due_cache.values), equal_nan=True)


@each_row(
    *(
        (*row, dtype)
        for row in [(library, case) for library in LIBRARIES for case in cases_of(library)]
        for dtype in TOLERANCES
    )
)
def test_steps_equal_those_of_the_torch_backend(library: str, case: str, dtype: torch.dtype) -> None:
    inputs = without_nan(CASES[case].inputs(LIBRARIES[library][2], dtype), library)

    assert_equal_to_torch(library, inputs, CASES[case].layer)


@each_row(("flash_attn 2", 512), ("flash_attn 3", 1), ("flash_attn 3", 19), ("flash_attn 3", 128), ("xformers", 192))
def test_every_block_size_that_the_rules_allow(library: str, block_size: int) -> None:
    for case in ("decodes and chunks", "window, decodes"):
        if case in cases_of(library):
            inputs = without_nan(CASES[case].inputs(block_size, DTYPE), library)
            assert_equal_to_torch(library, inputs, CASES[case].layer)


@each_row(*product([(1, 1), (3, 3), (8, 1)], LIBRARIES))
def test_every_number_of_query_heads_for_a_kv_head(heads: tuple[int, int], library: str) -> None:
    step = Step(MIXED, LIBRARIES[library][2])

    inputs = without_nan(LayerInput(step, heads, 32, is_rotated=True, dtype=DTYPE), library)

    assert_equal_to_torch(library, inputs, AttentionLayer(0.2))


@each_row(*LIBRARIES)
def test_calls_are_those_that_were_agreed_to(library: str) -> None:
    agreed = json.loads(PATH.read_text("utf-8"))

    assert describe_calls(library) == agreed[library]


@each_row(*product(["flash_attn 2", "flash_attn 3"], [AttentionLayer(0.25), AttentionLayer(0.25, WINDOW, 1.5)]))
def test_decodes_on_the_device_equal_those_planned_on_the_host(library: str, layer: AttentionLayer) -> None:
    stand_in, make, block_size, _ = LIBRARIES[library]
    step = Step(DECODES, block_size, layer.window_tokens)
    inputs = without_nan(LayerInput(step, (6, 2), 16, is_rotated=False, dtype=DTYPE), library)
    with stand_in() as calls:
        due, _ = inputs.attend(make(), layer)
        cache = LayerCache(inputs.keys.clone(), inputs.values.clone())
        backend = make()
        assert isinstance(backend, FlashAttention2Backend | FlashAttention3Backend)
        plan = backend.decode_plan(decode_batch(step), cache)
        ours = [plan.attend(inputs.qkv.clone(), None, cache, layer) for _ in range(2)]

    assert len(calls) == 3
    for attended in ours:
        torch.testing.assert_close(attended, due, rtol=0, atol=0)
    assert describe(calls[0]) == describe(calls[1]) == describe(calls[2])


@each_row("flash_attn 2", "flash_attn 3")
def test_decode_calls_are_equal_whatever_the_lengths(library: str) -> None:
    """A CUDA graph replays a call with new contents of the same tensors."""
    stand_in, make, block_size, _ = LIBRARIES[library]
    rows: list[Rows] = [[(600, 1), (3, 1)], [(0, 1), (599, 1)]]
    with stand_in() as calls:
        for each in rows:
            step = Step(each, block_size)
            inputs = without_nan(LayerInput(step, (6, 2), 16, is_rotated=False, dtype=DTYPE), library)
            cache = LayerCache(inputs.keys, inputs.values)
            backend = make()
            assert isinstance(backend, FlashAttention2Backend | FlashAttention3Backend)
            plan = backend.decode_plan(decode_batch(step), cache)
            plan.attend(inputs.qkv, None, cache, AttentionLayer(0.25, WINDOW))

    first, second = (describe(call) for call in calls)
    assert first | {"k_cache": "", "v_cache": ""} == second | {"k_cache": "", "v_cache": ""}


@each_row(
    ("flash_attn 2", AttentionLayer(0.25), [58, 33, 6, 3]),  # 264 places, 2 KV heads
    ("flash_attn 2", AttentionLayer(0.25, WINDOW), [40, 11, 2, 1]),  # 6 query heads, each alone
    ("flash_attn 3", AttentionLayer(0.25, WINDOW), [58, 23, 3, 2]),  # 132 places
)
def test_splits_of_decodes_follow_the_number_of_rows_alone(
    library: str, layer: AttentionLayer, splits: list[int]
) -> None:
    """Left to itself a library looks at how long rows may be, and a graph's may be of any length."""
    stand_in, make, block_size, _ = LIBRARIES[library]
    with stand_in() as calls:
        for num_rows, length in product((1, 8, 64, 128), (1, 300)):
            step = Step([(length - 1, 1)] * num_rows, block_size)
            inputs = without_nan(LayerInput(step, (6, 2), 16, is_rotated=False, dtype=DTYPE), library)
            inputs.attend(make(), layer)

    assert [call[1]["num_splits"] for call in calls[::2]] == [call[1]["num_splits"] for call in calls[1::2]] == splits


@each_row(*LIBRARIES)
def test_what_a_step_has_in_common_is_made_once_for_all_layers(library: str) -> None:
    stand_in, make, block_size, abilities = LIBRARIES[library]
    window = WINDOW if "window" in abilities else None
    layers = [AttentionLayer(0.25, window), AttentionLayer(0.5), AttentionLayer(0.3, window), AttentionLayer(0.25)]
    step = Step(MIXED, block_size)
    inputs = [without_nan(LayerInput(step, (4, 2), 16, dtype=DTYPE, seed=seed), library) for seed in range(len(layers))]
    with stand_in() as calls:
        caches = [LayerCache(each.keys.clone(), each.values.clone()) for each in inputs]
        plan = make().plan(step.metadata, caches[0])
        ours = [
            plan.attend(each.qkv.clone(), each.rotation, cache, layer)
            for each, cache, layer in zip(inputs, caches, layers, strict=True)
        ]

    for each, layer, attended in zip(inputs, layers, ours, strict=True):
        due, _ = each.attend(TorchAttentionBackend(), layer)
        torch.testing.assert_close(attended, due, rtol=TOLERANCES[DTYPE], atol=TOLERANCES[DTYPE])
    per_layer = len(calls) // len(layers)
    for name in calls[0][1].keys() & {"block_table", "page_table", "cu_seqlens_q", "cache_seqlens", "attn_bias"}:
        assert calls[0][1][name] is calls[2 * per_layer][1][name]


@each_row(*LIBRARIES)
def test_keys_and_values_are_written_as_the_caller_wants(library: str) -> None:
    num_writes = 0

    def write(
        qkv: torch.Tensor, rotation: Rotation | None, slot_mapping: torch.Tensor, cache: LayerCache
    ) -> RotatedHeads:
        nonlocal num_writes
        num_writes += 1
        return write_in_torch(qkv, rotation, slot_mapping, cache)

    inputs = without_nan(LayerInput(Step(MIXED, LIBRARIES[library][2]), (6, 2), 16, dtype=DTYPE), library)

    assert_equal_to_torch(library, inputs, AttentionLayer(0.25), write=write)

    assert num_writes == 1


def logits_of(
    model: LanguageModel, backend: AttentionBackend, shape: CacheShape, lengths: Sequence[int]
) -> torch.Tensor | None:
    """Return the logits of some prompts, of their first 150 tokens together."""
    width = -(-max(lengths) // shape.block_size)
    engine = CacheEngine(shape, len(lengths) * width, 0, model.device)
    positions = np.concatenate([np.arange(length) for length in lengths])
    first_slots = np.repeat(np.arange(len(lengths)) * width * shape.block_size, lengths)
    metadata = AttentionMetadata(
        starts=np.zeros(len(lengths), np.int32),
        lengths=np.array(lengths, np.int32),
        block_tables=np.arange(len(lengths) * width, dtype=np.int32).reshape(-1, width),
        slot_mapping=torch.from_numpy(first_slots + positions),
    )
    plan = backend.plan(metadata, engine.layers[0])
    token_ids = torch.zeros(sum(lengths), dtype=torch.int64)
    with torch.inference_mode():
        hidden = model.forward(token_ids, torch.from_numpy(positions), engine.layers, plan, torch.arange(150))
        return model.logits(hidden)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_model_has_the_logits_of_the_torch_backend(library: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, head_dim=32)
    stand_in, make, block_size, _ = LIBRARIES[library]
    config = ExecutorConfig(model=str(tmp_path))
    model_config = read_model_config(ModelDirectory(tmp_path), config)
    with stand_in() as calls:
        logits = []
        for attention in (TorchAttentionBackend(), make()):
            made = make_model(model_config, DTYPE, torch.device("cpu"), attention=attention)
            model, backend = made.model, made.attention
            made.load(Checkpoint(tmp_path))
            shape = CacheShape(2, block_size, 2, 32, DTYPE)
            logits.append(logits_of(model, backend, shape, (150, 50)))

    assert len(calls) == model.shape.num_layers
    due, ours = logits
    assert due is not None
    assert ours is not None
    assert due.shape == (150, model_config.vocab_size)
    assert (ours - due).norm() < 0.02 * due.norm()


@each_row(
    ("flash_attn 2", "flash_attn", (8, 0), FlashAttention2Backend),
    ("flash_attn 3", "flash_attn", (9, 0), FlashAttention3Backend),
    ("xformers", "xformers", (8, 9), XformersBackend),
)
def test_the_choice_makes_the_backend(
    library: str, name: BackendName, capability: tuple[int, int], backend: type[AttentionBackend]
) -> None:
    needs = AttentionNeeds(DTYPE, 6, 2, 64, [AttentionLayer(0.125)], capability)
    installed = InstalledLibraries("2.8.3", library == "flash_attn 3", "0.0.35")
    stand_in, _, block_size, _ = LIBRARIES[library]

    chosen = choose_backend(name, needs, installed=installed)

    assert chosen.block_size == block_size
    with stand_in():
        assert isinstance(chosen.make(), backend)


def test_the_stand_ins_refuse_what_the_libraries_refuse() -> None:
    """Else the tests above would say little."""
    layer = AttentionLayer(0.25)

    def attend(library: str, block_size: int, dtype: torch.dtype = DTYPE, head_dim: int = 16) -> None:
        stand_in, make, *_ = LIBRARIES[library]
        inputs = LayerInput(Step(DECODES, block_size), (2, 2), head_dim, is_rotated=False, dtype=dtype)
        with stand_in():
            inputs.attend(make(), layer)

    with pytest.raises(AssertionError, match="must be divisible by 256"):
        attend("flash_attn 2", 16)
    with pytest.raises(AssertionError, match="only support fp16 and bf16"):
        attend("flash_attn 3", 16, torch.float32)
    with pytest.raises(AssertionError, match="must be a multiple of 8"):
        attend("flash_attn 2", 256, head_dim=12)
    with pytest.raises(AssertionError, match="page size should be divisible"):
        attend("xformers", 16)
    with pytest.raises(AssertionError, match="Embed dim 96 not supported"):
        attend("xformers", 64, head_dim=96)
    for library, function in (("flash_attn 2", "flash_attn_varlen_func"), ("flash_attn 3", "flash_attn_with_kvcache")):
        stand_in = LIBRARIES[library][0]
        with stand_in(), pytest.raises(TypeError, match="unexpected keyword argument 'seqused_k'"):
            module = import_module("flash_attn" if library == "flash_attn 2" else "flash_attn_interface")
            getattr(module, function)(*[None] * 7, seqused_k=None)

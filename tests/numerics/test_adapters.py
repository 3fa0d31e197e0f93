"""What adapters add: the logits of a model with the adapter merged into its weights, and the bits of a row alone."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.adapters.files import LowRankPair
from executor_svc.adapters.slots import AdapterSlots, using
from executor_svc.adapters.step_rows import NO_ADAPTER, RUN_ROWS, TASK_ROWS, AdapterRows, StepRows
from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.parallel.group import SINGLE_RANK
from executor_svc.worker.adapter_sources import AdapterSources
from executor_svc.worker.model_runner import adapters_of
from executor_svc.worker.worker_adapters import WorkerAdapters
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Adapter, AdapterLoad, AdapterLoaded, TableDelta
from tests.numerics.architectures import VOCAB_SIZE, PagedRun, load_architecture, save_tiny_architecture
from tests.numerics.bits import assert_same_bits
from tests.numerics.driver import StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.native import LANES, library_path
from tests.numerics.threaded_group import ThreadedRanks
from tests.support.adapters import merged, save_adapter

# q, k and v apart or in one tensor, gates and ups apart or in one, norms of heads and of outputs, biases, windows.
FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "BloomForCausalLM")
NUM_SLOTS = 9


def loaded(directory: Path, **settings: Any) -> tuple[Decoder, Any, AdapterSlots]:
    """Load a tiny model with slots for adapters."""
    model, backend = load_architecture(directory, max_adapter_slots=NUM_SLOTS, lora_dir=("/",), **settings)
    assert isinstance(model, Decoder)
    assert model.adapters is not None
    return model, backend, model.adapters


def with_adapters(slots: AdapterSlots, of_rows: Sequence[int], lengths: Sequence[int]) -> AbstractContextManager[None]:
    """Let a step that wants all its tokens have adapters."""
    wanted = np.arange(sum(lengths))
    return using(slots, StepRows.of(np.array(of_rows, np.int32), np.array(lengths, np.int32), wanted))


def tokens(num_tokens: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()
    return found


def logits_of(
    model: Decoder, backend: Any, slots: AdapterSlots, prompt: list[int], slot: int, chunk: int, *, is_composed: bool
) -> torch.Tensor:
    """Compute a sequence alone, in chunks."""
    run = PagedRun(model, backend, is_composed=is_composed)
    table, found = run._block_tables(1, len(prompt)), []
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        with with_adapters(slots, [slot], [len(part)]):
            found.append(run.step([part], [start], table)[0])
    return torch.cat(found)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_merged_model(name: str, kernels: str, tmp_path: Path) -> None:
    reference = save_tiny_architecture(tmp_path / "model", name, FAMILY_ARCHITECTURES[name])
    model, backend, slots = loaded(tmp_path / "model", cpu_kernels=kernels)
    prompt = tokens(37, seed=1)
    base = reference(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    for slot, rank in enumerate((4, 16, 64)):
        size = 0.2 / rank**0.5
        directory = save_adapter(
            tmp_path / f"{rank}", slots.shapes, rank=rank, seed=rank, size=size, lora_alpha=2 * rank
        )
        adapter = slots.read(directory)
        slots.load(slot, adapter)
        expected = merged(reference, adapter.pairs)(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
        assert (expected - base).abs().max() > 0.1 * base.abs().max(), "it changes the model"

        for is_composed in (False, True):
            actual = logits_of(model, backend, slots, prompt, slot, 16, is_composed=is_composed)
            assert (actual - expected).abs().max() < 2e-4 * expected.abs().max(), (rank, is_composed)
            assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    assert (logits_of(model, backend, slots, prompt, NO_ADAPTER, 16, is_composed=False) - base).abs().max() < 1e-3


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8-a8"}, {"compute_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_bits_of_a_row_alone_are_those_among_eight_adapters(
    name: str, settings: dict[str, Any], lanes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.native.library.find_library", lambda: library_path(lanes))
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    model, backend, slots = loaded(tmp_path, **settings)
    base_model, base_backend = load_architecture(tmp_path, **settings)
    for slot in range(8):
        shapes = dict(list(slots.shapes.items())[slot % 3 :])  # some have nothing for some products
        directory = save_adapter(tmp_path / f"{slot}", shapes, rank=3 + 5 * slot, seed=slot, size=0.2)
        slots.load(slot, slots.read(directory))
    lengths = [1, 70, 1, 2, 1, 40, 1, 1, 1, 3, 1, 5, 1, 1, 1, 1]
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    of_rows = [slot % 9 if slot % 9 < 8 else NO_ADAPTER for slot in range(len(lengths))]
    run = PagedRun(model, backend, num_blocks=320)
    table = run._block_tables(len(lengths), 80)[:, :20]

    with with_adapters(slots, of_rows, lengths):
        together = run.step(prompts, [0] * len(lengths), table)

    for prompt, slot, actual in zip(prompts, of_rows, together, strict=True):
        for chunk in (1, 33, 80):
            alone = logits_of(model, backend, slots, prompt, slot, chunk, is_composed=chunk == 33)
            assert_same_bits(actual, alone, f"slot {slot}, chunks of {chunk}")
        if slot == NO_ADAPTER:
            assert_same_bits(actual, PagedRun(base_model, base_backend).prompt_logits(prompt, 80), "no adapter")
    slots.load(8, slots.read(tmp_path / "0"))
    slots.drop(0)
    elsewhere = logits_of(model, backend, slots, prompts[0], 8, 80, is_composed=False)
    assert_same_bits(together[0], elsewhere, "another slot")
    dropped = logits_of(model, backend, slots, prompts[0], 0, 80, is_composed=False)
    assert_same_bits(dropped, PagedRun(base_model, base_backend).prompt_logits(prompts[0], 80), "dropped")


def test_runs_have_the_rows_of_one_adapter_and_of_one_task() -> None:
    slots = np.random.default_rng(0).integers(-1, 3, 5 * TASK_ROWS).astype(np.int32)
    slots[300:500] = 2

    rows = AdapterRows.of(slots)

    assert sorted(rows.order) == np.flatnonzero(slots != NO_ADAPTER).tolist()
    assert rows.runs[0, 1] == 0
    assert rows.runs[1:, 1].tolist() == rows.runs[:-1, 2].tolist()
    for slot, begin, end in rows.runs:
        own = rows.order[begin:end]
        assert 0 < len(own) <= RUN_ROWS
        assert (slots[own] == slot).all()
        assert (np.diff(own) > 0).all()
        assert len(set(own // TASK_ROWS)) == 1
    assert len(AdapterRows.of(np.full(3, NO_ADAPTER, np.int32)).runs) == 0


def test_loads_end_beside_steps_and_tell_why_they_failed(tmp_path: Path) -> None:
    save_tiny_architecture(tmp_path / "model", "LlamaForCausalLM", FAMILY_ARCHITECTURES["LlamaForCausalLM"])
    _, _, slots = loaded(tmp_path / "model")
    folders = [save_adapter(tmp_path / f"{seed}", slots.shapes, rank=4, seed=seed) for seed in (1, 2)]
    digest = bytes.fromhex(slots.read(folders[0]).digest)
    adapters = WorkerAdapters(slots, AdapterSources([tmp_path / "1"], {"two": folders[1]}), SINGLE_RANK)
    table, ends = BatchTable(4, 64, 4, 8, num_adapter_slots=NUM_SLOTS), dict[int, AdapterLoaded]()
    adapters.reset(table)
    (tmp_path / "1" / "same").symlink_to(folders[0])

    sources = (str(folders[0] / "same"), digest), ("two", digest), (str(tmp_path / "model"), b""), ("two", b"")
    begun = tuple(AdapterLoad(slot, Adapter(*source)) for slot, source in enumerate(sources))
    adapters.follow(TableDelta(adapter_loads=begun))
    adapters.follow(TableDelta(adapter_drops=(3,)))
    while len(ends) < 3:
        ends |= {end.slot: end for end in adapters.take_loaded()}

    assert "no path in the folders of --lora-dir" in ends[0].error, "the folder itself is no adapter in it"
    assert "has another content now" in ends[1].error
    assert "no path in the folders of --lora-dir" in ends[2].error
    adapters.follow(TableDelta(adapter_loads=(AdapterLoad(0, Adapter("two")),)))
    while not (told := adapters.take_loaded()):
        pass
    assert told == (AdapterLoaded(0, bytes.fromhex(slots.read(folders[1]).digest)),)
    loaded_slots = [bool(product._kept[slot]) for _, product in slots._products for slot in range(4)]  # type: ignore[attr-defined]
    assert loaded_slots == [True, False, False, False] * len(slots._products)
    adapters.reset(table)
    while adapters.take_loaded() or any(product._kept[0] for _, product in slots._products):  # type: ignore[attr-defined]
        pass
    assert not any(product._kept[0] for _, product in slots._products)  # type: ignore[attr-defined]


WORKERS = {"in one call": (1, "native"), "one by one": (1, "torch"), "ranks in C": (2, "native"), "ranks": (2, "torch")}


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("kind", WORKERS)
def test_sequences_of_a_worker_have_their_adapters(name: str, kind: str, tmp_path: Path) -> None:
    reference = save_tiny_architecture(tmp_path / "model", name, FAMILY_ARCHITECTURES[name])
    num_ranks, kernels = WORKERS[kind]
    config = {
        "num_device_blocks": 200,
        "block_size_tokens": 4,
        "max_adapter_slots": 3,
        "lora_dir": ("/",),
        "cpu_kernels": kernels,
    }
    ranks = ThreadedRanks(ExecutorConfig.model_validate({"model": str(tmp_path / "model"), **config}), num_ranks)
    of_ranks = [adapters_of(worker._runner.model) for worker in ranks.workers]
    prompts, of_rows = [tokens(length, seed=length) for length in (9, 1, 14, 6)], [2, NO_ADAPTER, 0, 2]
    pairs: dict[int, Mapping[str, LowRankPair]] = {NO_ADAPTER: {}}
    for slots in of_ranks:
        assert slots is not None
        slots.of_sequences = np.full(len(slots.of_sequences), NO_ADAPTER, np.int32)
        slots.of_sequences[:4] = of_rows
        for slot in (0, 2):
            adapter = slots.read(save_adapter(tmp_path / f"{slot}", slots.shapes, rank=4, seed=slot))
            slots.load(slot, adapter)
            pairs[slot] = adapter.pairs

    outputs = StepDriver(ranks).generate(prompts, 8, chunk_size=5)

    ranks.close()
    for prompt, output, slot in zip(prompts, outputs, of_rows, strict=True):
        sequence = torch.tensor([prompt + output])
        logits = merged(reference, pairs[slot])(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == output

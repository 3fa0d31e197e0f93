"""Drafts of a model's own head: those of the reference, and the same ones whatever the schedule."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.config import ExecutorConfig
from executor_svc.drafts.mtp import Mtp, MtpRunner
from executor_svc.worker.interface import Worker
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.step import Int32Array, TableDelta, pairs
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.driver import PoisonedCacheEngine, StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.mtp_reference import MtpReference
from tests.numerics.reference import random_prompt
from tests.numerics.threaded_group import ThreadedRanks
from tests.support.each_row import each_row

NUM_DRAFTS = 3
# A draft may differ from the reference's where the two best logits are as near as the order of sums makes a difference.
NEAR = 1e-3


@pytest.mark.parametrize("kernels", ["native", "composed", "two ranks"])
@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"])
def test_drafts_are_those_of_the_reference(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind prompts in chunks, and behind drafts of which some are right."""
    reference = MtpReference.save(tmp_path, name, FAMILY_ARCHITECTURES[name])
    monkeypatch.setattr("executor_svc.worker.assembly.CacheEngine", PoisonedCacheEngine)
    monkeypatch.setattr("executor_svc.drafts.drafting.RowCost.share", lambda *_: 0.001)
    if kernels == "composed":
        monkeypatch.setattr("executor_svc.worker.assembly.native_forward", lambda *_: None)
    config = ExecutorConfig(
        model=str(tmp_path),
        draft_method="mtp",
        max_draft_tokens=NUM_DRAFTS,
        block_size_tokens=4,
        num_device_blocks=60,
        max_num_seqs=8,
    )
    worker: Worker = ThreadedRanks(config, 2) if kernels == "two ranks" else load_worker(config)
    found: list[tuple[list[int], list[int]]] = []

    def recorded(
        self: Mtp, runner: MtpRunner, table: BatchTable, slots: Int32Array, num_tokens: Int32Array, most: Int32Array
    ) -> Int32Array:
        sequences = [table.token_ids[slot, :end].tolist() for slot, end in zip(slots, num_tokens, strict=True)]
        drafts = draft(self, runner, table, slots, num_tokens, most)
        found.extend(zip(sequences, drafts.tolist(), strict=True))
        assert (most == NUM_DRAFTS).all()
        return drafts

    draft = Mtp.draft
    monkeypatch.setattr(Mtp, "draft", recorded)
    driver = StepDriver(worker)
    prompts = [random_prompt(11), random_prompt(1, seed=1), random_prompt(6, seed=2)]
    admissions = tuple(driver.admission(slot, prompt, 40) for slot, prompt in enumerate(prompts))
    allowed = pairs(*((slot, NUM_DRAFTS + 1) for slot in range(3)))
    driver.execute(TableDelta(admissions=admissions, prefill_chunks=pairs((0, 5), (1, 1), (2, 6)), allowances=allowed))
    driver.execute(TableDelta(prefill_chunks=pairs((0, 6))), [[], [], []])
    for _ in range(4):
        driver.execute(TableDelta())
        table = worker.table
        ends = table.num_tokens[:3].tolist()
        sequences = [torch.from_numpy(table.token_ids[slot, :end].astype(np.int64)) for slot, end in enumerate(ends)]
        known = [reference.model.generate(each[None], max_new_tokens=2, do_sample=False)[0] for each in sequences]
        right = [row[end:].tolist() for row, end in zip(known, ends, strict=True)]
        driver.execute(TableDelta(), [right[0], [right[1][0], right[1][1] ^ 1], []])

    assert len(found) >= 12
    for sequence, drafts in found:
        for place, token_id in enumerate(drafts):
            logits = reference.logits(sequence, drafts[:place])
            assert logits[token_id] > logits.max() - NEAR, (sequence, place)
    if isinstance(worker, ThreadedRanks):
        worker.close()


@each_row(
    ("Qwen3_5ForCausalLM", {}, "draft_method is mtp, but .* has no head for it: set --draft-method prompt-lookup"),
    ("LlamaForCausalLM", {}, "config.json is of no family that has a head for it"),
    ("GPT2LMHeadModel", {}, "draft_method is mtp, which needs Octavo's own decoder; but"),
    ("Qwen3_5ForCausalLM with a head", {"cpu_kernels": "torch"}, "needs the kernels in C, but cpu_kernels is torch"),
)
def test_a_model_that_cannot_draft_is_refused_in_a_sentence(
    name: str, settings: dict[str, Any], expected: str, *, tmp_path: Path
) -> None:
    architecture, _, head = name.partition(" ")
    save = MtpReference.save if head else save_tiny_architecture
    save(tmp_path, architecture, FAMILY_ARCHITECTURES.get(architecture, {}))

    with pytest.raises(ModelLoadError, match=expected):
        load_worker(ExecutorConfig(model=str(tmp_path), draft_method="mtp", num_device_blocks=8, **settings))

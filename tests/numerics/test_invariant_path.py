"""On the invariant path torch allocates and moves data; it computes nothing between token ids and a step's answer.

Every operation that torch runs in steps with all that rows can ask for is listed, by stage, and held against a list.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_svc.config import ExecutorConfig
from executor_svc.models.decoder import Decoder
from executor_svc.sampler.sampler import Sampler
from executor_svc.worker.loading import load_worker
from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import Admission, SamplingRow, StepResult, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from tests.numerics.architectures import VOCAB_SIZE, save_tiny_architecture
from tests.numerics.driver import StepDriver
from tests.numerics.family_architectures import FAMILY_ARCHITECTURES
from tests.numerics.launch_ahead import Ahead
from tests.numerics.reference import random_prompt

# What torch may run, and why that is no arithmetic. Operators by their names in ATen.
ALLOWED = {
    "empty": "allocates",
    "alias": "the same memory",
    "detach": "the same memory",
    "lift_fresh": "the same memory",
    "resolve_conj": "the same memory: nothing here is complex",
    "resolve_neg": "the same memory: nothing here is complex",
    "slice": "a part of the same memory",
    "to": "copies, or the same memory",
    "index": "copies some rows",
    "index_put_": "copies into some rows",
}
# Exact, so that no order of operations shows: token ids and positions only.
ALLOWED_OF_INTEGERS = {"eq": "which ids are unknown", "where": "fills unknown ids in"}

STAGES = {
    "model": ((Decoder, "forward"), (Decoder, "logits")),
    "sampler": ((Sampler, "sample"), (Sampler, "candidates"), (Sampler, "prompt_logprobs")),
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what torch runs: in which stage, and the name of the operator, with what makes it arithmetic."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stages = ["worker"]
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        of_floats = any(dtype.is_floating_point for dtype in dtypes)
        if of_floats and len(dtypes) > 1 and name in ("_to_copy", "to", "copy_"):
            name += ", rounds"
        elif of_floats and name in ALLOWED_OF_INTEGERS:
            name += ", of floats"
        self.seen.add((self.stages[-1], name))
        return result

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Note what runs meanwhile as another stage's."""
        self.stages.append(name)
        try:
            yield
        finally:
            self.stages.pop()

    def arithmetic(self) -> set[tuple[str, str]]:
        """Return what is on no list."""
        return {(stage, name) for stage, name in self.seen if name not in ALLOWED and name not in ALLOWED_OF_INTEGERS}


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Operations:
    """A recorder that knows when which stage runs."""
    noted = Operations()

    def staged(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with noted.stage(stage):
                return method(*args)

        return run

    for stage, methods in STAGES.items():
        for owner, name in methods:
            monkeypatch.setattr(owner, name, staged(stage, getattr(owner, name)))
    return noted


PENALTIES = SamplingRow(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2)
ALL_FILTERS = SamplingRow(temperature=0.8, top_k=30, top_p=0.9, min_p=0.01, typical_p=0.9, seed=3)
RULES = TokenRules(
    biased_token_ids=np.array([3, 4], np.int32),
    biases=np.array([1.5, -2.0], np.float32),
    stop_token_ids=np.array([2], np.int32),
    banned_token_ids=np.array([5], np.int32),
    banned_words=pad_words([[6, 7]]),
    allowed_mask=pack_mask(np.arange(1, VOCAB_SIZE, dtype=np.int32), VOCAB_SIZE),
)
SAMPLINGS = (
    SamplingRow(),
    SamplingRow(num_logprobs=0),
    SamplingRow(temperature=1.0, seed=1, num_logprobs=5),
    replace(ALL_FILTERS, num_logprobs=2),
    PENALTIES,
    replace(PENALTIES, temperature=0.7, min_tokens=9),
    SamplingRow(num_candidates=6),
    replace(PENALTIES, num_candidates=6),
)


def admissions(driver: StepDriver) -> tuple[Admission, ...]:
    """Return a row of every kind; rules and log-probabilities of the prompt with some."""
    made = [driver.admission(slot, random_prompt(9 + slot, seed=slot), 8, row) for slot, row in enumerate(SAMPLINGS)]
    for slot in (0, 3, 5, 7):
        made[slot] = replace(made[slot], token_rules=RULES)
    for slot, num_alternatives in ((1, 0), (2, 3)):
        made[slot] = replace(made[slot], num_prompt_logprobs=num_alternatives)
    return tuple(made)


def run_steps(driver: StepDriver) -> list[StepResult]:
    """Run two chunks of every prompt, and decode what no beam is: once, then twice without waiting in between."""
    rows = admissions(driver)
    first = pairs(*((row.slot, 5) for row in rows))
    second = pairs(*((row.slot, len(row.token_ids) - 5) for row in rows))
    results = [
        driver.execute(TableDelta(admissions=rows, prefill_chunks=first)),
        driver.execute(TableDelta(prefill_chunks=second)),
        driver.execute(TableDelta()),
    ]
    ahead = Ahead(driver)
    ahead.launch(TableDelta())
    ahead.launch(TableDelta())
    return results + ahead.finish()


def loaded(directory: Path, **changes: Any) -> StepDriver:
    settings = {
        "cpu_kernels": "native",
        "dtype": "float32",
        "num_device_blocks": 100,
        "block_size_tokens": 4,
        **changes,
    }
    worker = load_worker(ExecutorConfig(model=str(directory), **settings))
    assert isinstance(worker, TorchWorker)
    return StepDriver(worker)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", FAMILY_ARCHITECTURES)
def test_from_token_ids_to_the_answer_torch_computes_nothing(
    name: str, quantization: str, tmp_path: Path, operations: Operations
) -> None:
    save_tiny_architecture(tmp_path, name, FAMILY_ARCHITECTURES[name])
    driver = loaded(tmp_path, quantization=quantization)

    with operations:
        results = run_steps(driver)

    assert operations.arithmetic() == set()
    assert {stage for stage, _ in operations.seen} == {"worker", *STAGES}
    # And all was asked for.
    last_chunk, decoded = results[1:3]
    for field in (
        "logprobs",
        "alternative_token_ids",
        "candidate_logprobs",
        "prompt_logprobs",
        "prompt_alternative_logprobs",
    ):
        assert getattr(last_chunk, field) is not None, field
    assert len(decoded.sampled_token_ids) == sum(row.num_candidates == 0 for row in SAMPLINGS)


def test_what_torch_computes_is_seen(tmp_path: Path, operations: Operations) -> None:
    """The same steps with torch's kernels: products of the model, filters of the sampler."""
    save_tiny_architecture(tmp_path, "LlamaForCausalLM", {})
    driver = loaded(tmp_path, cpu_kernels="torch")

    with operations:
        run_steps(driver)

    assert {("model", "mm"), ("sampler", "exp_"), ("sampler", "cumsum"), ("sampler", "sort")} <= operations.arithmetic()

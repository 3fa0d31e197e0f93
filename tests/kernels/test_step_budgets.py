"""What launching a step takes of the host on a GPU: it may not grow unnoticed, and does not grow with the rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from executor_svc.worker.torch_worker import TorchWorker
from octavo_shared.step_wire.step import SamplingRow, TableDelta, pairs
from octavo_shared.step_wire.token_rules import TokenRules, pack_mask, pad_words
from tests.device.workers import worker_with
from tests.kernels.launches import log_kernels
from tests.kernels.step_budget import Budget, CountedGraphs, Spending, ZeroedMemory, spending
from tests.numerics.driver import StepDriver, fork_of
from tests.numerics.launch_ahead import Ahead
from tests.numerics.reference import random_prompt
from tests.numerics.tiny_models import VOCAB_SIZE, save_tiny_model

GREEDY = SamplingRow()
DRAWN = SamplingRow(temperature=0.8, top_k=5, seed=1)
EVERYTHING = SamplingRow(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.9,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.5,
    min_tokens=9,
    num_logprobs=3,
    seed=3,
)
BEAM = SamplingRow(num_candidates=3, repetition_penalty=1.4)
RULES = TokenRules(
    biased_token_ids=np.array([3, 9], np.int32),
    biases=np.array([4.0, -7.0], np.float32),
    stop_token_ids=np.array([5], np.int32),
    banned_token_ids=np.array([11, 12], np.int32),
    banned_words=pad_words([[token, 7] for token in range(40)]),
    allowed_mask=pack_mask(np.arange(60, dtype=np.int32), VOCAB_SIZE),
)

# Only admissions and beams take more calls where rows are more: they are counted for the last of these.
NUM_ROWS = 2, 4

Steps = Callable[[StepDriver, int], list[TableDelta]]


def admit(
    driver: StepDriver, slots: Sequence[int], sampling: SamplingRow, rules: TokenRules | None = None, length: int = 3
) -> TableDelta:
    """Return a step with the prompts of some slots."""
    admissions = [driver.admission(slot, random_prompt(length, seed=slot), 12, sampling) for slot in slots]
    for admission in admissions:
        admission.token_rules = rules
        admission.num_prompt_logprobs = 2 if rules is not None else admission.num_prompt_logprobs
    return TableDelta(admissions=tuple(admissions), prefill_chunks=pairs(*[(slot, length) for slot in slots]))


def again(first: TableDelta) -> TableDelta:
    """Return a step that admits its slots anew."""
    admissions = tuple(replace(each, generation=each.generation + 1) for each in first.admissions)
    slots = np.array([each.slot for each in admissions], np.int32)
    return replace(first, admissions=admissions, released_slots=slots)


def decodes_of(sampling: SamplingRow, rules: TokenRules | None = None) -> Steps:
    """Return steps of which the last ones only decode."""
    return lambda driver, num_rows: [admit(driver, range(num_rows), sampling, rules), *[TableDelta()] * 3]


def prompts(driver: StepDriver, num_rows: int) -> list[TableDelta]:
    """Return steps of nothing but prompts."""
    first = admit(driver, range(num_rows), GREEDY)
    return [first, again(admit(driver, range(num_rows), GREEDY))]


def mixed(driver: StepDriver, num_rows: int) -> list[TableDelta]:
    """Return steps of which the last one has decodes and a prompt."""
    last = num_rows - 1
    return [admit(driver, range(last), DRAWN), admit(driver, [last], DRAWN), again(admit(driver, [last], DRAWN))]


def beams(driver: StepDriver, num_rows: int) -> list[TableDelta]:
    """Return steps of which the last one has all beams of a sequence."""
    slots = range(1, num_rows + 1)
    forked = TableDelta(
        beam_forks=tuple(fork_of(0, slot, BEAM) for slot in slots),
        appended_tokens=pairs(*[(slot, 7 + slot) for slot in slots]),
        activated_slots=np.array(slots, np.int32),
    )
    return [admit(driver, [0], BEAM), forked]


@dataclass(frozen=True, slots=True)
class Row:
    """What the last step takes, without graphs or with them."""

    cuda_graphs: str
    steps: Steps
    budget: Budget


ROWS = {
    "decode": Row("off", decodes_of(DRAWN), Budget(40, 8, 1, 42, 209)),
    "decode, greedy, by a graph": Row("auto", decodes_of(GREEDY), Budget(8, 4, 1, 10, 69)),
    "decode by a graph": Row("auto", decodes_of(DRAWN), Budget(10, 4, 1, 10, 69)),
    "prompts": Row("off", prompts, Budget(34, 8, 1, 41, 306)),
    "prompts by pieces": Row("auto", prompts, Budget(13, 6, 1, 14, 226)),
    "decodes and a prompt": Row("off", mixed, Budget(42, 9, 1, 43, 303)),
    "decodes and a prompt by pieces": Row("auto", mixed, Budget(19, 6, 1, 14, 220)),
    "rows that ask for everything": Row("auto", decodes_of(EVERYTHING, RULES), Budget(91, 26, 4, 100, 166)),
    "beams": Row("auto", beams, Budget(43, 6, 3, 41, 180)),
}


@pytest.fixture(scope="module")
def graphs() -> CountedGraphs:
    """Return what records the graphs of all kinds."""
    return CountedGraphs()


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory, graphs: CountedGraphs) -> Iterator[dict[str, TorchWorker]]:
    """Yield the worker of each setting of `cuda_graphs`."""
    directory = tmp_path_factory.mktemp("model")
    save_tiny_model(directory)
    room = {"max_num_seqs": 5, "max_num_batched_tokens": 16}
    with pytest.MonkeyPatch.context() as monkeypatch, ZeroedMemory():  # type: ignore[no-untyped-call]
        log_kernels(monkeypatch, are_run=False)
        monkeypatch.setattr("executor_svc.models.torch_dense.MAX_ROWS_TRANSPOSED", 0)  # they are a CPU's
        yield {
            each: worker_with("triton", directory, torch.float32, monkeypatch, graphs, cuda_graphs=each, **room)[0]
            for each in ("off", "auto")
        }


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_steps_take_no_more_than_their_budgets(num_rows: int, workers: dict[str, TorchWorker]) -> None:
    spent = {name: spent_on_last_step(workers[row.cuda_graphs], row.steps, num_rows) for name, row in ROWS.items()}
    found, due = {name: each.budget for name, each in spent.items()}, {name: row.budget for name, row in ROWS.items()}
    if num_rows != NUM_ROWS[-1]:
        found, due = ({name: replace(each, calls=0) for name, each in budgets.items()} for budgets in (found, due))
    assert found == due, {
        name: (each.on_device, each.copies, each.calls) for name, each in spent.items() if found[name] != due[name]
    }


def spent_on_last_step(worker: TorchWorker, steps: Steps, num_rows: int) -> Spending:
    """Launch steps ahead of the device, twice: what is looked up once is known then."""
    for _ in range(2):
        worker.reset()
        ahead = Ahead(StepDriver(worker))
        *earlier, last = steps(ahead.driver, num_rows)
        for delta in earlier:
            ahead.launch(delta)
        with spending() as spent:
            ahead.launch(last)
        ahead.finish()
    return spent


@pytest.mark.usefixtures("workers")
def test_graphs_hold_no_more_than_their_budget(graphs: CountedGraphs) -> None:
    """Of two layers, by number of rows and by number of tokens."""
    assert {size: len(launches) for size, launches in graphs.of_graphs.items()} == dict.fromkeys((1, 2, 4, 5), 34)
    assert {size: len(launches) for size, launches in graphs.of_pieces.items()} == dict.fromkeys((8, 16), 31)

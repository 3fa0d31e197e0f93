"""Steps at both ends: every rank has the same table, and a rank that fails alone ends the group."""

import queue
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

from executor_svc.fake.worker import FakeWorker
from executor_svc.parallel.rank_channel import RankChannel, accept_ranks, connect
from executor_svc.worker.interface import Agree, RunningStep, execute
from executor_svc.worker.rank_worker import LeaderWorker, follow
from octavo_shared.errors import InvalidStepError, ModelLoadError, StepFailedError
from octavo_shared.step_wire.step import Step, StepResult, TableDelta, pairs
from tests.support.patience import PATIENCE_S
from tests.support.steps import StepOnDevice
from tests.support.tables import admission


class BrokenWorker(FakeWorker):
    """Fails in the middle of step 2, as by lack of memory."""

    def execute(self, step: Step) -> StepResult:
        if step.step_id == 2:
            raise StepFailedError("step 2 failed: no memory") from MemoryError()
        return super().execute(step)


class GroupEndedError(Exception):
    """The process would have ended."""


def end_group(reason: str) -> NoReturn:
    raise GroupEndedError(reason)


@dataclass
class Group:
    """Rank 0 and rank 1, which runs in a thread."""

    workers: tuple[FakeWorker, FakeWorker]
    losses: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    follower_error: Exception | None = None

    def __post_init__(self) -> None:
        self.steps, self.blocks = (RankChannel("127.0.0.1", PATIENCE_S, self.losses.put) for _ in range(2))
        self._following = threading.Thread(target=self._follow)
        self._following.start()
        accept_ranks([self.steps, self.blocks], 2, PATIENCE_S)
        self.leader = LeaderWorker(self.workers[0], self.steps, self.blocks, end_group)

    def _follow(self) -> None:
        steps, blocks = (
            connect(channel.address, 1, PATIENCE_S, self.losses.put) for channel in (self.steps, self.blocks)
        )
        try:
            follow(self.workers[1], steps, blocks)
        except StepFailedError as error:
            self.follower_error = error

    def stop(self) -> None:
        """Let rank 1 run what it was sent, and end."""
        self.blocks.close()
        self.steps.close()
        self._following.join(PATIENCE_S)
        assert not self._following.is_alive()

    def assert_same_tables(self) -> None:
        tables = [worker.table for worker in self.workers]
        assert tables[0].digest() == tables[1].digest()
        assert tables[0].token_ids.tolist() == tables[1].token_ids.tolist()


@pytest.fixture
def group() -> Iterator[Group]:
    made = Group((small_worker(), small_worker()))
    yield made
    made.stop()


def small_worker() -> FakeWorker:
    return FakeWorker(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)


def first_step(**changes: object) -> Step:
    delta = TableDelta(admissions=(admission(num_tokens=3, blocks=(0,)),), prefill_chunks=pairs((0, 3)))
    return Step(epoch=1, step_id=1, delta=delta, **changes)  # type: ignore[arg-type]


def decode(step_id: int) -> Step:
    return Step(epoch=1, step_id=step_id, delta=TableDelta())


def test_both_ranks_run_the_same_steps(group: Group) -> None:
    results = [execute(group.leader, step) for step in (first_step(), decode(2), decode(3))]
    assert all(len(result.sampled_token_ids) == 1 for result in results)
    group.stop()
    group.assert_same_tables()
    assert group.workers[1].table.num_tokens[0] == 6
    assert group.losses.empty()


def test_what_is_refused_is_refused_everywhere_and_the_group_goes_on(group: Group) -> None:
    execute(group.leader, first_step())
    with pytest.raises(InvalidStepError):
        execute(group.leader, Step(1, 2, TableDelta(prefill_chunks=pairs((3, 1)))))
    execute(group.leader, decode(2))
    group.stop()
    group.assert_same_tables()


def test_a_wrong_digest_fails_the_step_on_both_and_a_new_epoch_begins_anew(group: Group) -> None:
    with pytest.raises(StepFailedError, match="digest"):
        execute(group.leader, first_step(table_digest=1))
    group.leader.reset()
    assert not group.leader.table.live.any()
    execute(group.leader, first_step())
    group.stop()
    group.assert_same_tables()


def test_a_rank_that_fails_alone_ends_the_group() -> None:
    group = Group((small_worker(), BrokenWorker(max_num_seqs=4)))
    execute(group.leader, first_step())
    execute(group.leader, decode(2))
    assert group.losses.get(timeout=PATIENCE_S) == "rank 1 failed: step 2 failed: no memory"
    group.stop()
    assert isinstance(group.follower_error, StepFailedError)


class WorkerOfDevice(FakeWorker):
    """A fake whose steps run until the test ends them."""

    def __init__(self) -> None:
        super().__init__(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
        self.steps: list[StepOnDevice] = []
        self.launches = threading.Semaphore(0)

    def launch(self, step: Step) -> RunningStep:
        self.steps.append(StepOnDevice(self.execute(step)))
        self.launches.release()
        return self.steps[-1]


@pytest.fixture
def on_device() -> Iterator[tuple[Group, WorkerOfDevice]]:
    worker = WorkerOfDevice()
    made = Group((small_worker(), worker))
    yield made, worker
    for step in worker.steps:
        step.ended.set()
    made.stop()


def test_a_rank_launches_the_next_step_while_one_runs(on_device: tuple[Group, WorkerOfDevice]) -> None:
    group, worker = on_device
    for step in (first_step(), decode(2), decode(3)):
        execute(group.leader, step)
        assert worker.launches.acquire(timeout=PATIENCE_S)
    assert not any(step.finished.is_set() for step in worker.steps)

    worker.steps[1].ended.set()  # before the first
    worker.steps[0].ended.set()
    assert worker.steps[1].finished.wait(PATIENCE_S)  # although no frame came
    assert worker.steps[0].finished.is_set()
    assert not worker.steps[2].finished.is_set()
    execute(group.leader, decode(4))
    assert worker.launches.acquire(timeout=PATIENCE_S)


def test_a_device_that_fails_while_nothing_comes_ends_the_group(on_device: tuple[Group, WorkerOfDevice]) -> None:
    group, worker = on_device
    execute(group.leader, first_step())
    assert worker.launches.acquire(timeout=PATIENCE_S)
    worker.steps[0].error = StepFailedError("step 1 failed: no launch")
    worker.steps[0].ended.set()
    assert group.losses.get(timeout=PATIENCE_S) == "rank 1 failed: step 1 failed: no launch"


def test_a_new_epoch_begins_behind_the_steps_that_run(on_device: tuple[Group, WorkerOfDevice]) -> None:
    group, worker = on_device
    execute(group.leader, first_step())
    assert worker.launches.acquire(timeout=PATIENCE_S)
    worker.steps[0].ended.set()
    group.leader.reset()
    execute(group.leader, first_step())
    assert worker.launches.acquire(timeout=PATIENCE_S)
    group.assert_same_tables()


def test_rank_0_that_fails_alone_ends_the_group() -> None:
    group = Group((BrokenWorker(max_num_seqs=4), small_worker()))
    execute(group.leader, first_step())
    with pytest.raises(GroupEndedError, match="step 2 failed: no memory; a group of several ranks cannot continue"):
        execute(group.leader, decode(2))
    group.stop()


def test_rank_0_speaks_for_the_group(group: Group) -> None:
    assert group.leader.info is group.workers[0].info
    assert group.leader.tokenizer_files() == group.workers[0].tokenizer_files()


class OnOwnDisk(FakeWorker):
    """Sees another folder than rank 0."""

    def update_weights(self, folder: Path, weights_digest: str, agree: Agree = lambda _: None) -> None:
        super().update_weights(folder / "rank 1", weights_digest, agree)


@pytest.mark.parametrize(
    ("files", "refusal"),
    [
        ((b"new", b"new"), ""),
        ((b"new", None), "rank 1: rank 1 has no safetensors files"),
        ((b"new", b"other"), "rank 1 has other files in .* than rank 0"),
        ((None, b"new"), "has no safetensors files"),
        ((None, None), "has no safetensors files"),
    ],
)
def test_all_ranks_change_their_weights_or_none(
    files: tuple[bytes | None, bytes | None], refusal: str, tmp_path: Path
) -> None:
    group = Group((small_worker(), OnOwnDisk(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)))
    (tmp_path / "rank 1").mkdir()
    for folder, content in zip((tmp_path, tmp_path / "rank 1"), files, strict=True):
        if content is not None:
            (folder / "model.safetensors").write_bytes(content)
    before = [worker.info.model_hash for worker in group.workers]

    with pytest.raises(ModelLoadError, match=refusal) if refusal else nullcontext():
        group.leader.update_weights(tmp_path, "")
    group.leader.sleep(1)
    group.leader.wake()
    execute(group.leader, first_step())

    group.stop()
    group.assert_same_tables()
    changed = [worker.info.model_hash != old for worker, old in zip(group.workers, before, strict=True)]
    assert changed == [not refusal] * 2
    assert group.losses.empty()

"""Runs the steps of a log on an executor again, and compares what it answers: `octavo replay --executor`.

Each attachment of the log is run by itself, in an attachment of its own: the executor's table and cache begin empty.
The core is replayed beside it, since it knows which request a row belongs to. What a snapshot has in the cache is
computed first; steps that were in flight then are not compared, and those of which no answer was recorded neither.
"""

import asyncio
import copy
import secrets
from collections import deque
from dataclasses import dataclass, field

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.core.executor_core import ExecutorCore
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession, SessionTimings
from scheduler_svc.replay.comparison import Mismatch, RowOwner, first_mismatch, num_values
from scheduler_svc.replay.core_replay import CoreReplay
from scheduler_svc.replay.player import CannotLoadError, LoadedCore, Player
from scheduler_svc.replay.run import ReplayRun
from scheduler_svc.step_log.decoding import decode_info, decode_limits
from shared.batch_table import BatchTable
from shared.errors import InvalidStepError, OctavoServiceError
from shared.executor_info import ExecutorInfo
from shared.step import StepResult
from shared.wire import decode_result
from shared.wording import counted

MAX_MESSAGE_BYTES = 2**31 - 1


class ExecutorReplayError(OctavoServiceError):
    """The steps cannot be run on the executor; the message says why."""


@dataclass(slots=True)
class ExecutorReport:
    """What came of it, in lines; whether anything differs or could not be compared."""

    lines: list[str] = field(default_factory=list)
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    """A step of the log that waits for its recorded answer, and whose its rows are."""

    sent: StepInFlight
    samples: list[RowOwner]
    rows: list[RowOwner]

    @classmethod
    def of(cls, core: ExecutorCore, sent: StepInFlight) -> "_Sent":
        owners = core.batch.sequence_in_slot
        layout = sent.layout
        return cls(
            sent,
            [RowOwner.of(owners[slot]) for slot in layout.sample_slots.tolist()],
            [RowOwner.of(owners[slot]) for slot in layout.slots.tolist()],
        )


@dataclass(slots=True)
class _Attachment:
    """One attachment of the log that is to be run: a core, from where the replayed fleet begins."""

    fleet_number: int
    joined: pb.CoreJoined
    is_of_snapshot: bool


def replay_on_executor(run: ReplayRun, address: str) -> ExecutorReport:
    """Run all attachments of a log on an executor that nobody uses.

    Raises: ExecutorReplayError: it cannot be done at all.
    """
    header = run.first_header
    if header is None:
        raise ExecutorReplayError("no file of the log can be read")
    if header.has_masked_tokens:
        raise ExecutorReplayError(
            "the tokens of this log are masked, and no model can compute them; record one with --step-log-tokens plain"
        )
    attachments = list(_attachments(run))
    if not attachments:
        raise ExecutorReplayError("no executor was attached while the log was written: there is no step to run")
    return asyncio.run(_replay(run, address, attachments))


def _attachments(run: ReplayRun) -> list[_Attachment]:
    """Return the attachments of a log that have steps."""
    found: dict[tuple[int, int], _Attachment] = {}
    with_steps: set[tuple[int, int]] = set()
    fleet_number = 0
    again = ReplayRun(run.directory)
    for moment in again.play():
        if moment.is_first:
            fleet_number += 1
            for number, joined in moment.replay.joined.items():
                is_new = moment.record.WhichOneof("call") == "core_joined" and moment.record.core_joined.core == number
                if number in moment.replay.cores or is_new:
                    found[fleet_number, number] = _Attachment(fleet_number, joined, not is_new)
        call = moment.record.WhichOneof("call")
        if call == "core_joined":
            joined = moment.record.core_joined
            found.setdefault((fleet_number, joined.core), _Attachment(fleet_number, joined, False))
        elif moment.applied.step is not None:
            with_steps.add((fleet_number, moment.applied.core))
    return [attachment for key, attachment in found.items() if key in with_steps]


async def _replay(run: ReplayRun, address: str, attachments: list[_Attachment]) -> ExecutorReport:
    report = ExecutorReport()
    client = ExecutorClient(address, f"octavo-replay-{secrets.token_hex(4)}", SessionTimings(), MAX_MESSAGE_BYTES)
    for index, attachment in enumerate(attachments):
        try:
            async with client.attach(lambda instance_id: None) as session:
                if not index:
                    _say_what_answers(report, session.info, [a.joined for a in attachments], address)
                _require_fit(session.info, attachment.joined)
                await _Runner(run, session, attachment, report).run()
        except (ExecutorLostError, ExecutorRefusedError) as error:
            raise ExecutorReplayError(f"the executor at {address}: {error}") from error
        except (CannotLoadError, InvalidStepError, _MisfitError) as error:
            report.lines.append(f"{_name(attachment)} cannot be run: {error}")
            report.has_failed = True
    return report


def _say_what_answers(report: ExecutorReport, info: ExecutorInfo, joined: list[pb.CoreJoined], address: str) -> None:
    """Say first if the executor is of another kind; another model is refused."""
    for core in joined:
        recorded = decode_info(core)
        if recorded is not None and (recorded.model_hash, recorded.dtype) != (info.model_hash, info.dtype):
            raise ExecutorReplayError(
                f"the log is of model {recorded.model_id} {recorded.dtype} ({recorded.model_hash[:12]}); the executor "
                f"at {address} has {info.model_id} {info.dtype} ({info.model_hash[:12]})"
            )
    kinds = {recorded.numerics_id for core in joined if (recorded := decode_info(core)) is not None}
    if others := sorted(kinds - {info.numerics_id}):
        named = ", ".join(other[:12] or "none" for other in others)
        report.lines.append(
            f"another kind of executor: the log has numerics id {named}, and this one "
            f"{info.numerics_id[:12] or 'none'}; outputs may differ"
        )


class _MisfitError(OctavoServiceError):
    """The executor is too small, or has other blocks."""


def _require_fit(info: ExecutorInfo, joined: pb.CoreJoined) -> None:
    """Raise _MisfitError if the executor cannot hold what the recorded one held."""
    limits = decode_limits(joined)
    if info.block_size_tokens != limits.block_size:
        raise _MisfitError(
            f"its blocks have {info.block_size_tokens} tokens, and those of the log {limits.block_size}: start it with "
            f"--block-size-tokens {limits.block_size}"
        )
    if info.vocab_size != limits.vocab_size:
        raise _MisfitError(f"its vocabulary has {info.vocab_size} tokens, that of the log {limits.vocab_size}")
    needs = (
        ("blocks", info.num_device_blocks, limits.num_blocks, "--kv-cache-gib"),
        ("host blocks", info.num_host_blocks, limits.num_host_blocks, "--host-cache-gib"),
        ("slots", info.max_num_seqs, limits.max_num_seqs, "--max-num-seqs"),
        ("tokens in a sequence", info.max_model_len, limits.max_model_len, "--max-model-len"),
        ("tokens in a step", info.max_num_batched_tokens, limits.max_num_batched_tokens, "--max-num-batched-tokens"),
    )
    for what, there, needed, flag in needs:
        if there < needed:
            raise _MisfitError(f"it has {there} {what}, and the log needs {needed}; set its {flag}")


class _Runner:
    """Runs one attachment of a log."""

    def __init__(
        self, run: ReplayRun, session: ExecutorSession, attachment: _Attachment, report: ExecutorReport
    ) -> None:
        self._run = ReplayRun(run.directory)
        self._run.on_begin = self._begin
        self._player = Player(session)
        self._attachment = attachment
        self._report = report
        self._number = attachment.joined.core
        self._fleet_number = 0
        self._pending: deque[_Sent] = deque()
        # Of a snapshot: steps whose answers are still to come, and what the cache held after them.
        self._early: deque[StepInFlight] = deque()
        self._table: BatchTable | None = None
        self._loaded: LoadedCore | None = None
        self._num_steps = 0
        self._num_values = 0

    async def run(self) -> None:
        """Run it up to the first difference."""
        mismatch: Mismatch | None = None
        where = 0
        for moment in self._run.play():
            if self._fleet_number > self._attachment.fleet_number:
                break
            await asyncio.sleep(0)  # heartbeats are sent meanwhile
            if self._fleet_number < self._attachment.fleet_number or moment.applied.core != self._number:
                continue
            await self._load_if_due()
            if (decision := moment.applied.decision) is not None and decision.in_flight is not None:
                self._pending.append(_Sent.of(moment.replay.cores[self._number], decision.in_flight))
            elif moment.applied.updates is not None:
                where = moment.record.result_taken.result.step_id
                mismatch = await self._take(decode_result(moment.record.result_taken.result))
            if mismatch is not None or moment.record.WhichOneof("call") in ("core_left", "core_forgotten"):
                break
        self._tell(mismatch, where)

    def _begin(self, replay: CoreReplay) -> None:
        self._fleet_number += 1
        if self._fleet_number != self._attachment.fleet_number or self._number not in replay.cores:
            return
        core = replay.cores[self._number]
        if core.limits.sliding_window:
            raise CannotLoadError("a snapshot of a model with sliding windows cannot be computed again")
        self._early.extend(core.in_flight)
        self._table, self._loaded = copy.copy(core.table), LoadedCore(core)

    async def _load_if_due(self) -> None:
        """Compute what the snapshot had in the cache, as soon as the answers are known that were on their way."""
        if self._table is not None and self._loaded is not None and not self._early:
            table, self._table = self._table, None
            await self._player.load(table, self._loaded)

    async def _take(self, recorded: StepResult) -> Mismatch | None:
        """Run the step of a recorded answer; return what differs."""
        if self._early:
            assert self._table is not None
            assert self._loaded is not None
            layout = self._early.popleft().layout
            self._table.record(layout, recorded.sampled_token_ids)
            self._loaded.record(layout, recorded.sampled_token_ids)
            await self._load_if_due()
            return None
        sent = self._pending.popleft()
        layout, found = await self._player.run(sent.sent.step)
        self._num_steps += 1
        self._num_values += num_values(recorded)
        return first_mismatch(layout, sent.samples, sent.rows, recorded, found)

    def _tell(self, mismatch: Mismatch | None, where: int) -> None:
        report = self._report
        if mismatch is None:
            report.lines.append(
                f"{_name(self._attachment)}: {counted(self._num_steps, 'step')} run again, "
                f"{counted(self._num_values, 'number')}, all with the same bits"
            )
        else:
            report.lines.append(f"{_name(self._attachment)}, step {where}: {mismatch}")
            report.has_failed = True


def _name(attachment: _Attachment) -> str:
    joined = attachment.joined
    return f"attachment {joined.core}, {joined.name or 'an executor'}"

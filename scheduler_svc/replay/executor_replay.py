"""Runs the steps of a log on an executor again, and compares what it answers: `octavo replay --executor`.

Each attachment of the log is run by itself, in an attachment of its own: the executor's table and cache begin empty.
The planner is replayed beside it, since it knows which request a row belongs to. What a snapshot has in the cache is
computed first; steps that were in flight then are not compared, and those of which no answer was recorded neither.
"""

import asyncio
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import numpy as np

from octavo.calls.tls import handshake_trouble
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.wording import counted
from octavo_shared.errors import InvalidStepError, OctavoServiceError
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.cache_group import CacheKind
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, Step, StepResult
from octavo_shared.step_wire.wire import decode_result
from scheduler_svc.core.limits import CoreLimits, PoolLimits
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.results import with_counts
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.executors.client import ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.session import ExecutorLostError, ExecutorSession, SessionTimings
from scheduler_svc.replay.core_replay import CoreReplay
from scheduler_svc.replay.difference import Difference, RowOwner, first_mismatch, num_values
from scheduler_svc.replay.player import FOLLOWS_GRAMMARS, HAS_ADAPTERS, CannotRunError, LoadedCore, Player
from scheduler_svc.replay.run import ReplayRun
from scheduler_svc.step_log.records import decode_info, decode_limits
from scheduler_svc.step_log.state import copied

MAX_MESSAGE_BYTES = 2**31 - 1

_DIGITS_SHOWN = 12
# Of an executor and of a planner: what is said of it, and the flag that sets it.
_SIZES = (
    ("blocks", "num_device_blocks", "num_blocks", "--num-device-blocks"),
    ("host blocks", "num_host_blocks", "num_host_blocks", "--num-host-blocks"),
    ("slots", "max_num_seqs", "max_num_seqs", "--max-num-seqs"),
    ("tokens in a sequence", "max_model_len", "max_model_len", "--max-model-len"),
    ("tokens in a step", "max_num_batched_tokens", "max_num_batched_tokens", "--max-num-batched-tokens"),
)
# How an executor refuses to be attached that another scheduler has.
_HELD = re.compile(r"scheduler ('.*') holds the lease")


class ExecutorReplayError(OctavoServiceError):
    """The steps cannot be run on the executor; the message says why."""


@dataclass(slots=True)
class ExecutorReport:
    """Takes what comes of it, as it comes.

    Attributes:
        say: Takes a line.
        begin: Told which attachment is run next, and how many steps it has.
        advance: Told of each step that was run.
        has_failed: Whether anything differs or could not be compared.
    """

    say: Callable[[str], None]
    begin: Callable[[str, int], None]
    advance: Callable[[], None]
    has_failed: bool = False


@dataclass(slots=True)
class _Attachment:
    """One attachment of the log that is to be run: a planner, from where the replayed fleet begins."""

    fleet_number: int
    joined: pb.CoreJoined
    num_steps: int = 0

    @property
    def name(self) -> str:
        """How it is called in a report."""
        return f"attachment {self.joined.core}, {self.joined.name or 'an executor'}"


def replay_on_executor(run: ReplayRun, address: str, report: ExecutorReport) -> None:
    """Run all attachments of a log on an executor that nobody uses, and report what comes of it.

    Raises: ExecutorReplayError: it cannot be done at all.
    """
    header = run.first_header
    if header is None:
        raise ExecutorReplayError("no file of the log can be read")
    if header.has_masked_tokens:
        raise ExecutorReplayError(
            "the tokens of this log are masked, so no model can run it; record with --step-log-tokens plain"
        )
    attachments = list(_attachments(run))
    if not attachments:
        raise ExecutorReplayError("no executor was attached while the log was recorded: it has no steps to run")
    asyncio.run(_replay(run, address, attachments, report))


def _attachments(run: ReplayRun) -> list[_Attachment]:
    found: dict[tuple[int, int], _Attachment] = {}
    fleet_number = 0
    for moment in ReplayRun(run.directory).play():
        fleet_number += moment.is_first
        if moment.applied.step is not None:
            number = moment.applied.planner
            new = _Attachment(fleet_number, moment.replay.joined[number])
            found.setdefault((fleet_number, number), new).num_steps += 1
    return [found[key] for key in sorted(found)]


async def _replay(run: ReplayRun, address: str, attachments: list[_Attachment], report: ExecutorReport) -> None:
    client = ExecutorClient(
        address, f"octavo-replay-{secrets.token_hex(4)}", SessionTimings(), MAX_MESSAGE_BYTES, speculate="on"
    )
    told: set[str] = set()
    for attachment in attachments:
        try:
            async with client.attach(lambda instance_id: None) as session:
                troubles = misfits(session.info, (one.joined for one in attachments))
                if trouble := troubles.get(attachment.joined.core):
                    if trouble not in told:
                        _say_unfit(
                            report, [one for one in attachments if troubles.get(one.joined.core) == trouble], trouble
                        )
                    told.add(trouble)
                    continue
                if kind := other_kind(session.info, attachment.joined):
                    report.say(f"{attachment.name}: {kind}")
                report.begin(attachment.name, attachment.num_steps)
                await _Runner(run, session, attachment, report).run()
        except (ExecutorLostError, ExecutorRefusedError) as error:
            raise ExecutorReplayError(_why_refused(address, error)) from error
        except (CannotRunError, InvalidStepError) as error:
            _say_unfit(report, [attachment], str(error))


def _say_unfit(report: ExecutorReport, attachments: list[_Attachment], trouble: str) -> None:
    numbers = [str(attachment.joined.core) for attachment in attachments]
    which = attachments[0].name if len(numbers) == 1 else f"attachments {', '.join(numbers)}"
    report.say(f"{which} cannot be run: {trouble}")
    report.has_failed = True


def _why_refused(address: str, error: OctavoServiceError) -> str:
    cause = error.__cause__
    details = (cause.details() or "") if isinstance(cause, grpc.aio.AioRpcError) else ""
    if handshake_trouble(details, None) is not None:
        return (
            f"{address} closed the connection at once: octavo replay speaks plaintext gRPC only; give an executor "
            "without TLS"
        )
    if holder := _HELD.search(details):
        return f"the executor at {address} is in use by scheduler {holder[1]}; give an executor that no scheduler uses"
    return f"the executor at {address}: {error}"


@dataclass(frozen=True, slots=True)
class _Owned:
    """A step, whose its sample rows and rows are, and what the encoder reads for those that it admits, by slot."""

    step: Step
    samples: list[RowOwner]
    rows: list[RowOwner]
    encoder_token_ids: dict[int, Int32Array]


def _owned(planner: ExecutorPlanner, sent: StepInFlight) -> _Owned:
    owners = planner.batch.sequence_in_slot
    token_ids = {
        admission.slot: owners[admission.slot].group.encoder_token_ids
        for admission in sent.step.delta.admissions
        if admission.encoder_input is not None
    }
    samples, rows = (
        [RowOwner.of(owners[slot]) for slot in slots.tolist()]
        for slots in (sent.layout.sample_slots, sent.layout.slots)
    )
    return _Owned(sent.step, samples, rows, token_ids)


def _with_drafts(step: Step, recorded: StepResult) -> Step:
    """Have the executor prove what each row got at once, and no drafts of its own: these depend on its speed."""
    counts = recorded.token_counts
    if counts is None:
        counts = np.zeros(recorded.num_rows, np.uint8)
        return replace(step, draft_counts=counts, draft_token_ids=counts.astype(np.int32)[:0])
    is_last = np.zeros(int(counts.sum()), np.bool_)
    is_last[counts.cumsum(dtype=np.intp)[counts > 0] - 1] = True
    drafts = np.where(counts > 0, counts - 1, 0).astype(np.uint8)
    return replace(step, draft_counts=drafts, draft_token_ids=recorded.sampled_token_ids[~is_last])


class _Runner:
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
        # Steps that wait for their recorded answers, and whose their sample rows and rows are.
        self._pending: deque[_Owned] = deque()
        # Of a snapshot: steps whose answers are still to come, and what the cache held after them.
        self._early: deque[StepInFlight] = deque()
        self._table: BatchTable | None = None
        self._loaded: LoadedCore | None = None
        self._num_steps = 0
        self._num_values = 0

    async def run(self) -> None:
        """Run it up to the first difference."""
        mismatch: Difference | None = None
        where, ends = 0, ""
        for moment in self._run.play():
            if self._fleet_number > self._attachment.fleet_number:
                break
            await asyncio.sleep(0)  # heartbeats are sent meanwhile
            if self._fleet_number < self._attachment.fleet_number:
                continue
            kind = moment.record.WhichOneof("call")
            if kind == "weights_changed" and self._number in moment.replay.planners:
                ends = "the weights change"
                break
            if moment.applied.planner != self._number:
                continue
            await self._load_if_due()
            if (decision := moment.applied.decision) is not None and decision.in_flight is not None:
                self._pending.append(_owned(moment.replay.planners[self._number], decision.in_flight))
            elif moment.applied.updates is not None:
                where = moment.record.result_taken.result.step_id
                mismatch = await self._take(decode_result(moment.record.result_taken.result))
            ends = "lost with the executor" if kind in ("core_left", "core_forgotten") else ""
            if mismatch is not None or ends:
                break
        self._tell(mismatch, where, ends or "the log ends before it")

    def _begin(self, replay: CoreReplay) -> None:
        self._fleet_number += 1
        if self._fleet_number != self._attachment.fleet_number or self._number not in replay.planners:
            return
        planner = replay.planners[self._number]
        if planner.limits.more_groups:
            raise CannotRunError("a snapshot of a model with several cache groups cannot be computed again")
        if planner.blocks.states is not None:
            raise CannotRunError("a snapshot of a model with saved states cannot be computed again")
        if planner.limits.has_window:
            raise CannotRunError("a snapshot of a model with sliding windows cannot be computed again")
        if any(group.grammar is not None for group in (*planner.batch.running, *planner.swapped)):
            raise CannotRunError(FOLLOWS_GRAMMARS)
        if any(group.adapter is not None for group in (*planner.batch.running, *planner.swapped)):
            raise CannotRunError(HAS_ADAPTERS)
        self._early.extend(planner.in_flight)
        self._table, self._loaded = copied(planner.table), LoadedCore(planner)

    async def _load_if_due(self) -> None:
        """Compute what the snapshot had in the cache, as soon as the answers are known that were on their way."""
        if self._table is not None and self._loaded is not None and not self._early:
            table, self._table = self._table, None
            await self._player.load(table, self._loaded)

    async def _take(self, recorded: StepResult) -> Difference | None:
        """Run the step of a recorded answer; return what differs."""
        if self._early:
            assert self._table is not None
            assert self._loaded is not None
            layout = self._early.popleft().layout
            self._table.resolve(layout, recorded.sampled_token_ids, recorded.token_counts)
            self._loaded.record(layout, recorded.sampled_token_ids)
            await self._load_if_due()
            return None
        owned = self._pending.popleft()
        step = owned.step
        drafts = self._player.session.info.max_allowance > 1 and recorded.num_rows
        step = _with_drafts(step, recorded) if drafts else step
        layout, found = await self._player.run(step, owned.encoder_token_ids)
        if found.token_counts is not None:
            recorded = with_counts(layout, recorded)
        self._num_steps += 1
        self._report.advance()
        self._num_values += num_values(recorded)
        return first_mismatch(layout, owned.samples, owned.rows, recorded, found)

    def _tell(self, mismatch: Difference | None, where: int, why_unanswered: str) -> None:
        report, name = self._report, self._attachment.name
        if mismatch is not None:
            report.say(f"{name}, step {where}: {mismatch}")
            report.has_failed = True
            return
        unanswered = counted(len(self._pending), "step")
        rest = f"; {unanswered} had no recorded result ({why_unanswered})" if self._pending else ""
        steps, numbers = counted(self._num_steps, "step"), counted(self._num_values, "number")
        report.say(f"{name}: {steps} rerun, {numbers}, all bit-identical{rest}")


# Whether an executor can run an attachment -----------------------------------------------------------


def misfits(info: ExecutorInfo, attachments: Iterable[pb.CoreJoined]) -> dict[int, str]:
    """Return why an executor cannot run an attachment, by number; those that it can run are left out.

    Sizes are those that suffice for all of them, so that one start of the executor is enough.
    """
    joined = list(attachments)
    sizes = _size_trouble(info, joined)
    troubles = {planner.core: _model_trouble(info, planner) or sizes.get(planner.core, "") for planner in joined}
    return {number: trouble for number, trouble in troubles.items() if trouble}


def other_kind(info: ExecutorInfo, joined: pb.CoreJoined) -> str:
    """Return what may make the outputs of the same model differ; empty: nothing."""
    recorded = decode_info(joined)
    if recorded is None:
        return ""
    kinds = (
        ("numerics_id", recorded.numerics_id, info.numerics_id),
        ("weights digest", recorded.weights_digest, info.weights_digest),
    )
    others = _named_differences(kinds)
    return f"this executor is of a different kind, so outputs may differ: {others}" if others else ""


def _model_trouble(info: ExecutorInfo, joined: pb.CoreJoined) -> str:
    recorded = decode_info(joined)
    if recorded is None or (recorded.model_hash, recorded.dtype) == (info.model_hash, info.dtype):
        return ""
    others = _named_differences(
        (
            ("model hash", recorded.model_hash, info.model_hash),
            ("weights digest", recorded.weights_digest, info.weights_digest),
            ("numerics_id", recorded.numerics_id, info.numerics_id),
        )
    )
    ours, theirs = f"{info.model_id} {info.dtype}", f"{recorded.model_id} {recorded.dtype}"
    if ours == theirs:
        return f"the log and the executor have {ours} with different weights or settings, such as int8: {others}"
    return f"the log is of model {theirs}, and the executor has {ours}: {others}"


def _named_differences(kinds: Iterable[tuple[str, str, str]]) -> str:
    return "; ".join(
        f"{name} {recorded[:_DIGITS_SHOWN] or 'none'} in the log, {here[:_DIGITS_SHOWN] or 'none'} here"
        for name, recorded, here in kinds
        if recorded != here
    )


def _size_trouble(info: ExecutorInfo, joined: list[pb.CoreJoined]) -> dict[int, str]:
    limits = {planner.core: decode_limits(planner) for planner in joined}
    pools, states = _pools_of(info)
    info = replace(info, num_device_blocks=pools[0].num_blocks, num_host_blocks=pools[0].num_host_blocks)
    troubles: dict[int, str] = {}
    for number, of_core in limits.items():
        if info.block_size_tokens != of_core.block_size:
            troubles[number] = (
                f"its blocks have {info.block_size_tokens} tokens, the log's have {of_core.block_size}: start it "
                f"with --block-size-tokens {of_core.block_size}"
            )
        elif info.max_allowance < of_core.max_allowance:
            troubles[number] = (
                f"it drafts at most {info.max_allowance - 1} tokens, the log's executor {of_core.max_allowance - 1}: "
                f"start it with --max-draft-tokens {of_core.max_allowance - 1}"
            )
        elif info.vocab_size != of_core.vocab_size:
            troubles[number] = (
                f"its vocabulary has {info.vocab_size} tokens, the log's has {of_core.vocab_size}: start it with the "
                "log's model"
            )
        elif trouble := _pool_trouble(pools, states, of_core) or _encoder_trouble(info, of_core):
            troubles[number] = trouble
    fitting = [number for number in limits if number not in troubles]
    needs = [
        (what, getattr(info, there), max((getattr(limits[number], needed) for number in fitting), default=0), flag)
        for what, there, needed, flag in _SIZES
    ]
    lacks = [need for need in needs if need[1] < need[2]]
    flags = " ".join(f"{flag} {needed}" for _, _, needed, flag in lacks)
    sizes = " and ".join(f"{there} of {needed} {what}" for what, there, needed, _ in lacks)
    for number in fitting:
        if any(getattr(info, there) < getattr(limits[number], needed) for _, there, needed, _ in _SIZES):
            troubles[number] = f"it has {sizes} that the log needs: start it with {flags}"
    return troubles


def _pools_of(info: ExecutorInfo) -> tuple[tuple[PoolLimits, ...], PoolLimits]:
    """Return the pools of block tables, and that of saved states."""
    *groups, last = (
        PoolLimits(group.num_device_blocks, group.window_tokens, group.num_host_blocks)
        for group in info.pools(agreed=True)
        if group.kind is not CacheKind.ENCODER
    )
    return ((*groups,), last) if info.has_states else ((*groups, last), PoolLimits(0))


def _encoder_trouble(info: ExecutorInfo, limits: CoreLimits) -> str:
    """Say why an executor's encoder cannot do what the log asks; empty: it can. Ids of states follow its blocks."""
    here = next((group.num_device_blocks for group in info.cache_groups if group.kind is CacheKind.ENCODER), 0)
    if here == limits.num_encoder_blocks and info.max_encoder_tokens >= limits.max_encoder_tokens:
        return ""
    return (
        f"its encoder has {here} blocks and takes {info.max_encoder_tokens} tokens, the log needs exactly "
        f"{limits.num_encoder_blocks} and {limits.max_encoder_tokens}"
    )


def _pool_trouble(pools: tuple[PoolLimits, ...], states: PoolLimits, limits: CoreLimits) -> str:
    """Say why blocks of the log would be others in an executor's pools; empty: they are the same.

    The id of a block says which group it is of: among pools of other sizes it is one of another group.
    """
    has_several = len(pools) + len(limits.groups) > 2 or limits.num_state_blocks > 0
    if has_several and pools != limits.groups:
        return f"its cache groups are not those of the log: {_said(pools)} here, {_said(limits.groups)} in the log"
    if states.num_blocks < limits.num_state_blocks or states.num_host_blocks < limits.num_host_state_blocks:
        return (
            f"it saves {states.num_blocks} states and {states.num_host_blocks} on the host, the log needs "
            f"{limits.num_state_blocks} and {limits.num_host_state_blocks}"
        )
    return ""


def _said(pools: tuple[PoolLimits, ...]) -> str:
    return " and ".join(
        f"{pool.num_blocks} blocks, {pool.num_host_blocks} of the host, window {pool.sliding_window}" for pool in pools
    )

"""Each capability between peers that have it and peers that do not: nothing of it is used that was not agreed on."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from itertools import product
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from executor_svc.fake.worker import FakeWorker
from executor_svc.service.kept_responses import KeptResponses
from executor_svc.service.servicer import Context, ExecutionServicer
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import execution_service_pb2_grpc as pb_grpc
from octavo.execution.v1 import sampling_params_pb2, step_pb2
from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.cache_group import CacheGroup, CacheKind
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo
from octavo_shared.step_wire.step import Step, TableDelta
from octavo_shared.step_wire.wire_agreement import ADMISSION_FIELDS, ANSWER_FIELDS, SAMPLING_FIELDS, STEP_FIELDS
from scheduler_svc.executors import client as executor_client
from scheduler_svc.executors.client import WANTED, ExecutorClient, ExecutorRefusedError
from scheduler_svc.executors.serving_limits import PlannerSettings, serving_limits
from scheduler_svc.executors.session import ExecutorSession, SessionTimings
from tests.contract.execution_harness import first_step, refusal
from tests.skew.peers import FAKE, RELEASES, Code, each, executor_here, running, until_serving
from tests.support.each_row import each_row
from tests.support.stack import MAX_MESSAGE_BYTES, ExecutorProcess

pytestmark = pytest.mark.timeout(60)

Request = step_pb2.ExecuteModelRequest
Admission = step_pb2.Admission
Answer = step_pb2.ExecuteModelResponse

IN_A_STEP = {
    "registered_blocks": Request(registered_blocks=step_pb2.RegisteredBlocks(block_ids=[1], names=bytes(16))),
    "allowances": Request(allowances=[0, 4]),
    "grammar_loads": Request(grammar_loads=[step_pb2.GrammarLoad(body=b"{}")]),
    "grammar_drops": Request(grammar_drops=[0]),
    "adapter_loads": Request(adapter_loads=[step_pb2.AdapterLoad(adapter_id="a")]),
    "adapter_drops": Request(adapter_drops=[0]),
    "expected_weights_version": Request(expected_weights_version=0),
    "blocks_to_send": Request(blocks_to_send=[step_pb2.BlockSend(transfer_id=1)]),
    "blocks_to_receive": Request(blocks_to_receive=[step_pb2.BlockReceive(transfer_id=1)]),
    "transfers_to_cancel": Request(transfers_to_cancel=[1]),
    "draft_counts": Request(draft_counts=b"\1"),
    "draft_token_ids": Request(draft_token_ids=bytes(4)),
    "pooling_inputs": Request(pooling_inputs=[step_pb2.PoolingInput(token_ids=bytes(4))]),
    "states_to_save": Request(states_to_save=[0, 4, 1]),
    "keeps_live": Request(keeps_live=True),
}
IN_AN_ADMISSION = {
    "grammar_slot": Admission(grammar_slot=0),
    "adapter_slot": Admission(adapter_slot=0),
    "encoder_input": Admission(encoder_input=step_pb2.EncoderInput(num_encoder_tokens=1)),
    "state_block": Admission(state_block=0),
}
IN_SAMPLING_PARAMS = {"no_repeat_ngram_size": sampling_params_pb2.SamplingParams(no_repeat_ngram_size=3)}
IN_AN_ANSWER = {
    "token_counts": Answer(token_counts=b"\1"),
    "draft_counts": Answer(draft_counts=b"\1"),
    "row_flags": Answer(row_flags=b"\1"),
    "adapters_loaded": Answer(adapters_loaded=[step_pb2.AdapterLoaded(error="no")]),
    "weights_version": Answer(weights_version=0),
    "arrived_transfers": Answer(arrived_transfers=[1]),
    "sent_transfers": Answer(sent_transfers=[1]),
    "cancelled_transfers": Answer(cancelled_transfers=[1]),
    "lengths_digest": Answer(lengths_digest=0),
    "last_resolved_step_id": Answer(last_resolved_step_id=1),
    "pooling_outputs": Answer(pooling_outputs=[step_pb2.PoolingOutput(values=bytes(4))]),
    "grammars_loaded": Answer(grammars_loaded=[step_pb2.GrammarLoaded(error="no")]),
}
OF_THE_EXECUTOR = [capability for capability in Capability if capability is not Capability.NUMERICS]


def client_of(address: str) -> ExecutorClient:
    """Return what a scheduler dials an executor with."""
    return ExecutorClient(address, "one", SessionTimings(), MAX_MESSAGE_BYTES, speculate="on")


def attached(executor: ExecutorProcess) -> AbstractAsyncContextManager[ExecutorSession]:
    """Attach to an executor as the scheduler does."""
    return client_of(executor.address).attach(lambda _: None)


async def run_empty_step(session: ExecutorSession) -> None:
    """Send a step that computes nothing and take its answer."""
    await session.send(Step(epoch=session.epoch, step_id=1, delta=TableDelta()))
    assert (await session.receive()).step_id == 1


def attach_request(wire_version: int, *capabilities: int) -> pb.AttachRequest:
    return pb.AttachRequest(
        scheduler_id="one",
        lease_ms=60_000,
        min_wire_version=1,
        max_wire_version=wire_version,
        capabilities=capabilities,  # type: ignore[arg-type]
    )


# What a scheduler asks an executor for


class RecordingChannel:
    """A channel that keeps what is sent over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self.sent: list[Message] = []

    def unary_unary(self, method: str, **options: Any) -> object:
        return self._channel.unary_unary(method, **self._recording(options))

    def stream_unary(self, method: str, **options: Any) -> object:
        return self._channel.stream_unary(method, **options)

    def stream_stream(self, method: str, **options: Any) -> object:
        return self._channel.stream_stream(method, **self._recording(options))

    def _recording(self, options: dict[str, Any]) -> dict[str, Any]:
        def serialize(message: Message) -> bytes:
            self.sent.append(message)
            return message.SerializeToString()

        return {**options, "request_serializer": serialize}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """All messages that schedulers of this process send to executors."""
    messages: list[Message] = []
    connect: Callable[..., None] = pb_grpc.ExecutionServiceStub.__init__

    def connect_recorded(stub: pb_grpc.ExecutionServiceStub, channel: grpc.aio.Channel) -> None:
        recording = RecordingChannel(channel)
        recording.sent = messages
        connect(stub, recording)

    monkeypatch.setattr(pb_grpc.ExecutionServiceStub, "__init__", connect_recorded)
    return messages


def asked_for(sent: list[Message]) -> list[int]:
    """Return the capabilities of the one Attach."""
    [attach] = [message for message in sent if isinstance(message, pb.AttachRequest)]
    return list(attach.capabilities)


def steps_in(sent: list[Message]) -> list[Request]:
    return [m.step for m in sent if isinstance(m, pb.StreamStepsRequest) and m.HasField("step")]


@each(RELEASES)
async def test_an_executor_of_a_release_is_asked_for_what_it_has_and_gets_feature_bits_from_version_2_on(
    release: Code, sent: list[Message]
) -> None:
    has_capabilities = release.wire_versions[1] > 1
    later = {
        Capability.ROW_FLAGS: release.has_row_flags,
        Capability.GRAMMARS: release.has_grammars,
        Capability.GRAMMARS_READY: release.tells_loads,
        Capability.POOLING: release.has_pooling,
        Capability.BLOCK_TRANSFER: release.has_transfers,
        Capability.CACHE_GROUPS: False,  # the fake model's layers are alike
        Capability.STATES: False,
        Capability.ENCODER: False,
        Capability.ADAPTERS: False,  # as the fake model has none, and there are no transfers, in these releases
        Capability.BLOCK_TRANSFER: False,
        Capability.VARIABLE_TOKENS: False,  # it drafts only if it is told to
        Capability.WEIGHT_VERSIONS: False,  # its weights stay as they are
        Capability.NO_REPEAT_NGRAM: False,
    }
    lacking = {capability for capability, has_it in later.items() if not has_it}
    expected = WANTED - lacking if has_capabilities else set()
    async with running(release, FAKE, *["--pooling"] * release.has_pooling) as executor:
        await until_serving(executor)
        async with client_of(executor.address).attach(lambda _: None) as session:
            await run_empty_step(session)
            info = session.info
    assert (info.numerics_id != "", info.is_invariant, info.weights_digest != "") == (has_capabilities,) * 3
    assert set(asked_for(sent)) == expected
    assert [step.HasField("feature_bits") for step in steps_in(sent)] == [has_capabilities]


@pytest.mark.parametrize("announced", Capability)
async def test_a_scheduler_asks_only_for_what_is_announced_and_what_it_uses(
    announced: Capability, monkeypatch: pytest.MonkeyPatch, sent: list[Message]
) -> None:
    monkeypatch.setattr(ExecutorInfo, "capabilities", frozenset({announced}))
    async with executor_here(FakeWorker()) as executor, attached(executor) as session:
        await run_empty_step(session)
        has_numerics = session.info.numerics_id != ""
    assert asked_for(sent) == ([announced] if announced in WANTED else [])
    assert has_numerics == (announced is Capability.NUMERICS), "what belongs to a capability counts only if agreed on"
    assert [step.HasField("feature_bits") for step in steps_in(sent)] == [True]


async def test_what_attach_says_of_numerics_and_weights_counts_not_what_was_said_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attach = ExecutionServicer.Attach

    async def attach_another(self: ExecutionServicer, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        response = await attach(self, request, context)
        response.info.numerics_id, response.info.weights_digest = "another", "other"
        return response

    monkeypatch.setattr(ExecutionServicer, "Attach", attach_another)
    async with executor_here(FakeWorker()) as executor, attached(executor) as session:
        assert (session.info.numerics_id, session.info.weights_digest) == ("another", "other")


AGREEING: dict[str, tuple[Callable[[pb.AttachResponse], object], str]] = {
    "more than was wanted": (
        lambda response: response.capabilities.extend([5, 40]),  # type: ignore[list-item]
        "it accepted capabilities that this scheduler did not offer: ADAPTERS,40",
    ),
    "capabilities of version 1": (
        lambda response: setattr(response, "wire_version", 1),
        "it accepted capabilities that this scheduler did not offer: "
        "NUMERICS,NAMED_BLOCKS,GRAMMARS,ROW_FLAGS,GRAMMARS_READY,NO_REPEAT_NGRAM",
    ),
    "numerics without an id": (
        lambda response: response.info.ClearField("numerics_id"),
        "it accepted the capability NUMERICS but sent no numerics_id",
    ),
    "an endless id": (
        lambda response: setattr(response.info, "weights_digest", "f" * 1000),
        "its weights_digest has 1000 characters; this scheduler accepts at most 256",
    ),
}


@pytest.mark.parametrize("what", AGREEING)
async def test_an_executor_that_agrees_on_what_cannot_be_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, words = AGREEING[what]
    attach = ExecutionServicer.Attach

    async def agree(self: ExecutionServicer, request: pb.AttachRequest, context: Context) -> pb.AttachResponse:
        response = await attach(self, request, context)
        change(response)
        return response

    monkeypatch.setattr(ExecutionServicer, "Attach", agree)
    async with executor_here(FakeWorker()) as executor:
        with pytest.raises(ExecutorRefusedError) as refused:
            async with attached(executor):
                pass
    assert str(refused.value) == words


# What an executor agrees on, and what it refuses


@each_row(
    (1, [1, 4], []), (2, [], []), (2, [*range(1, 15), 40], [1, 2, 4, 9, 13, 14]), (9, [0, 4, 13], []), (2, [9, 13], [9])
)
async def test_an_executor_agrees_on_what_it_has_and_is_silent_on_the_rest(
    wire_version: int, wanted: list[int], agreed: list[int]
) -> None:
    async with executor_here(FakeWorker()) as executor, grpc.aio.insecure_channel(executor.address) as channel:
        stub = pb_grpc.ExecutionServiceStub(channel)
        assert list((await stub.GetExecutorInfo(pb.GetExecutorInfoRequest())).capabilities) == [1, 2, 4, 9, 13, 14]
        response = await stub.Attach(attach_request(wire_version, *wanted))
        assert list(response.capabilities) == agreed
        assert response.wire_version == min(wire_version, 2)


async def test_several_tokens_a_step_are_agreed_on_with_row_flags_only_and_within_what_the_executor_can() -> None:
    worker = FakeWorker(max_allowance=4, max_num_batched_tokens=512)
    async with executor_here(worker) as executor, grpc.aio.insecure_channel(executor.address) as channel:
        stub = pb_grpc.ExecutionServiceStub(channel)
        for wanted, max_allowance, agreed in (
            ([3], 0, []),
            ([3, 9], 0, [3, 9]),
            ([3, 9], 2, [3, 9]),
            ([3, 9], 9, [3, 9]),
        ):
            request = attach_request(2, *wanted)
            request.capability_parameters.max_allowance = max_allowance
            response = await stub.Attach(request)
            assert list(response.capabilities) == agreed
            parameters = response.capability_parameters
            expected = (min(max_allowance or 4, 4), 512) if agreed else (0, 0)
            assert (parameters.max_allowance, parameters.max_sample_rows) == expected


@each_row((8, 0, 4), (8, 2, 2), (8, 9, 4), (9, 2, 0))
async def test_transfers_are_agreed_on_within_what_the_executor_can(
    capability: int, max_transfers: int, agreed: int
) -> None:
    executor = executor_here(FakeWorker(max_transfers=4))
    async with executor as process, grpc.aio.insecure_channel(process.address) as channel:
        request = attach_request(2, capability)
        request.capability_parameters.max_transfers = max_transfers
        response = await pb_grpc.ExecutionServiceStub(channel).Attach(request)
        assert response.capability_parameters.max_transfers == agreed


@pytest.mark.parametrize(("wanted", "most"), [(WANTED - {Capability.VARIABLE_TOKENS}, 1), (WANTED, 4)])
async def test_a_scheduler_gives_allowances_only_where_it_wants_them(
    wanted: frozenset[Capability], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_client, "WANTED", wanted)
    async with executor_here(FakeWorker(max_allowance=4)) as executor, attached(executor) as session:
        limits = serving_limits(session.info, PlannerSettings())
    assert limits.max_allowance == most


async def refused_step(wire_version: int, change: Request) -> str:
    """Return how an executor of today refuses its first step with a change; it must take the step without it."""
    async with executor_here(FakeWorker()) as executor, grpc.aio.insecure_channel(executor.address) as channel:
        stub = pb_grpc.ExecutionServiceStub(channel)
        wanted = set(Capability) - {
            Capability.NAMED_BLOCKS,
            Capability.ROW_FLAGS,
            Capability.NO_REPEAT_NGRAM,
        }  # it has these
        epoch = (await stub.Attach(attach_request(wire_version, *wanted))).epoch
        step = first_step(epoch)
        if wire_version > 1:
            step.feature_bits = 0
        changed = Request.FromString(step.SerializeToString())
        changed.MergeFrom(change)
        code, details = await refusal(stub.ExecuteModel(changed))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        answer = await stub.ExecuteModel(step)
        assert answer.step_id == 1, "something of the refused step was kept"
        assert answer.HasField("feature_bits") == (wire_version > 1)
        return details


def with_field(name: str) -> Request:
    """Return a step that has a field."""
    if name in IN_SAMPLING_PARAMS:
        return Request(forks=[step_pb2.Fork(slot=1, sampling_params=IN_SAMPLING_PARAMS[name])])
    return IN_A_STEP.get(name) or Request(admissions=[IN_AN_ADMISSION[name]])


@each_row(*product([1, 2], [*IN_A_STEP, *IN_AN_ADMISSION, *IN_SAMPLING_PARAMS]))
async def test_a_field_that_was_not_agreed_on_is_refused_by_name_and_nothing_is_written(
    wire_version: int, name: str
) -> None:
    bits, change = Request(), with_field(name)
    capability = (STEP_FIELDS | ADMISSION_FIELDS | SAMPLING_FIELDS)[name]
    if wire_version > 1:
        bits.feature_bits = 1 << capability
    bits.MergeFrom(change)
    details = await refused_step(wire_version, bits)
    assert details.startswith(f"step 1 has {name}")
    assert details.endswith(f", but the capability {capability.name} was not agreed on at Attach")


@each_row(0, *OF_THE_EXECUTOR, 12, 63)
async def test_feature_bits_that_are_not_known_or_not_agreed_on_are_refused_by_name_or_number(number: int) -> None:
    name = next((capability.name for capability in Capability if capability == number), str(number))
    details = await refused_step(2, Request(feature_bits=1 << number))
    assert details == f"step 1 has bit {number} of feature_bits, but the capability {name} was not agreed on at Attach"


FULL = CacheGroup(CacheKind.FULL, (0, 2), 16, 100)
OF_WINDOW = CacheGroup(CacheKind.WINDOW, (1,), 16, 40, window_tokens=64)


async def test_pools_are_laid_out_as_attach_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(cache_groups=(FULL, OF_WINDOW))
    async with executor_here(worker) as executor:
        async with attached(executor) as session:
            await run_empty_step(session)
            assert session.info.cache_groups == (FULL, OF_WINDOW)
            assert [group.num_device_blocks for group in worker.table.groups] == [100, 40]
        monkeypatch.setattr("scheduler_svc.executors.client.WANTED", WANTED - {Capability.CACHE_GROUPS})
        async with attached(executor) as session:
            await run_empty_step(session)
            assert session.info.cache_groups == ()
            assert [group.num_device_blocks for group in worker.table.groups] == [4096]


@each_row((), (Capability.CACHE_GROUPS,), (Capability.STATES,))
async def test_an_executor_with_states_refuses_a_scheduler_that_does_not_know_them(
    *known: Capability, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_caches = {Capability.CACHE_GROUPS, Capability.STATES}
    monkeypatch.setattr(executor_client, "WANTED", (WANTED - of_caches) | {*known})
    async with executor_here(FakeWorker(has_states=True)) as executor:
        with pytest.raises(ExecutorRefusedError) as refused:
            async with attached(executor):
                pass
    rule = "must be STATES and CACHE_GROUPS among them, as layers of the model keep a state of each sequence"
    assert rule in str(refused.value)


async def test_an_executor_with_states_is_attached_with_the_tables_of_its_other_layers() -> None:
    worker = FakeWorker(has_states=True, num_device_blocks=100, max_allowance=4)
    async with executor_here(worker) as executor, attached(executor) as session:
        await run_empty_step(session)
        limits = serving_limits(session.info, PlannerSettings())
    assert [group.kind for group in session.info.cache_groups] == [CacheKind.FULL, CacheKind.STATE]
    assert [group.num_device_blocks for group in worker.table.groups] == [100]
    assert (limits.has_states, limits.prefix_caching, limits.max_allowance) == (True, False, 4)


async def test_an_executor_whose_groups_leave_a_layer_out_is_refused() -> None:
    async with executor_here(FakeWorker(cache_groups=(FULL, replace(OF_WINDOW, layers=(3,))))) as executor:
        with pytest.raises(ExecutorRefusedError, match="layer 1 is in no cache group, of 2 groups"):
            async with attached(executor):
                pass


# What a scheduler refuses in an answer


def answering(monkeypatch: pytest.MonkeyPatch, change: Callable[[Answer], object]) -> None:
    """Have executors of this process change each answer before they send it."""
    append = KeptResponses.append

    def append_changed(log: KeptResponses, answer: Answer) -> None:
        change(answer)
        append(log, answer)

    monkeypatch.setattr(KeptResponses, "append", append_changed)


async def fault_of_an_empty_step() -> str:
    async with executor_here(FakeWorker()) as executor:
        with pytest.raises(ExecutorFaultError) as fault:
            async with attached(executor) as session:
                await run_empty_step(session)
        return str(fault.value)


@pytest.mark.parametrize("name", IN_AN_ANSWER)
async def test_an_answer_with_a_field_that_was_not_agreed_on_is_a_fault(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutorInfo, "capabilities", WANTED - {ANSWER_FIELDS[name]})
    answering(monkeypatch, lambda answer: answer.MergeFrom(IN_AN_ANSWER[name]))
    agreed = f"the capability {ANSWER_FIELDS[name].name} was not agreed on at Attach"
    assert await fault_of_an_empty_step() == f"the answer to step 1 has {name}, but {agreed}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda answer: answer.ClearField("feature_bits"),
            "step 1 was answered without feature_bits; wire version 2 was agreed on",
        ),
        (lambda answer: setattr(answer, "feature_bits", 16), "step 1 was answered with feature_bits 0x10, not 0x0"),
    ],
    ids=["none", "others"],
)
async def test_an_answer_that_does_not_repeat_the_feature_bits_is_a_fault(
    change: Callable[[Answer], object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, change)
    assert await fault_of_an_empty_step() == words


def test_there_is_a_row_for_each_field_and_each_capability() -> None:
    assert set(IN_A_STEP) == set(STEP_FIELDS)
    assert set(IN_AN_ADMISSION) == set(ADMISSION_FIELDS)
    assert set(IN_SAMPLING_PARAMS) == set(SAMPLING_FIELDS)
    assert set(IN_AN_ANSWER) == set(ANSWER_FIELDS)
    tables = (STEP_FIELDS, ADMISSION_FIELDS, SAMPLING_FIELDS, ANSWER_FIELDS)
    used = {capability for table in tables for capability in table.values()}
    in_parameters_alone = {Capability.CACHE_GROUPS}
    assert used == {*OF_THE_EXECUTOR} - in_parameters_alone

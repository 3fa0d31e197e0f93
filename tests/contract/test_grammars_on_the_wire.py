"""Grammars on the execution wire: loads, drops, the slot of an admission, refusals, and the flags of an answer."""

import hashlib

import grpc
import numpy as np
import pytest

from octavo.execution.v1 import execution_service_pb2 as pb
from octavo.execution.v1 import step_pb2
from octavo_shared.grammar.grammar import MAX_GRAMMAR_BYTES
from octavo_shared.step_wire.step import RowFlag
from tests.contract.execution_harness import Executor, first_step, refusal

GRAMMARS, ROW_FLAGS = 4, 9
BITS = 1 << GRAMMARS
AB = b'start: "ab"'


async def attach(executor: Executor, *, num_grammar_slots: int = 0) -> pb.AttachResponse:
    request = pb.AttachRequest(
        scheduler_id="a",
        lease_ms=10_000,
        min_wire_version=1,
        max_wire_version=2,
        capabilities=[GRAMMARS, ROW_FLAGS],  # type: ignore[list-item]
    )
    request.capability_parameters.num_grammar_slots = num_grammar_slots
    return await executor.stub.Attach(request)


def load(grammar_slot: int, body: bytes = AB, digest: bytes | None = None) -> step_pb2.GrammarLoad:
    digest = hashlib.sha256(body).digest() if digest is None else digest
    return step_pb2.GrammarLoad(grammar_slot=grammar_slot, digest=digest, body=body)


def guided_step(epoch: int, body: bytes = AB) -> step_pb2.ExecuteModelRequest:
    """Return step 1, which loads a grammar and follows it in slot 0."""
    step = first_step(epoch)
    step.admissions[0].grammar_slot = 7
    step.grammar_loads.append(load(7, body))
    step.feature_bits = BITS
    return step


async def run(executor: Executor, epoch: int, step_id: int) -> tuple[int, bytes]:
    answer = await executor.stub.ExecuteModel(
        step_pb2.ExecuteModelRequest(epoch=epoch, step_id=step_id, feature_bits=0)
    )
    return int(np.frombuffer(answer.sampled_token_ids, "<i4")[0]), answer.row_flags


async def test_an_executor_says_what_it_can_do_with_grammars_and_the_lesser_number_is_agreed_on(
    executor: Executor,
) -> None:
    offered = (await executor.stub.GetExecutorInfo(pb.GetExecutorInfoRequest())).capability_parameters
    agreed = (await attach(executor, num_grammar_slots=3)).capability_parameters
    assert (offered.num_grammar_slots, offered.max_grammar_bytes) == (256, MAX_GRAMMAR_BYTES)
    assert (agreed.num_grammar_slots, agreed.max_grammar_bytes) == (3, MAX_GRAMMAR_BYTES)
    assert agreed.matcher_id == offered.matcher_id != ""


async def test_an_output_follows_its_grammar_to_its_end_and_behind_it_nothing_else_comes(executor: Executor) -> None:
    epoch = (await attach(executor)).epoch
    answer = await executor.stub.ExecuteModel(guided_step(epoch))
    first = int(np.frombuffer(answer.sampled_token_ids, "<i4")[0])
    rest = [await run(executor, epoch, step_id) for step_id in range(2, 6)]
    assert [(first, answer.row_flags), *rest] == [(token, b"") for token in (*b"ab", 257, 257, 257)]


@pytest.mark.parametrize(
    ("body", "flag"),
    [
        (b"nonsense", RowFlag.GRAMMAR_FAILED),
        (b'{"grammars":[{"json_schema":{"$ref":"#"}}]}', RowFlag.NO_TOKEN_ALLOWED),
    ],
)
async def test_a_grammar_that_cannot_be_followed_fails_no_step(executor: Executor, body: bytes, flag: RowFlag) -> None:
    epoch = (await attach(executor)).epoch
    answer = await executor.stub.ExecuteModel(guided_step(epoch, body))
    assert answer.row_flags == bytes([flag])
    assert (await run(executor, epoch, 2))[1] == bytes([flag])


REFUSED = {
    "another digest": (
        step_pb2.ExecuteModelRequest(grammar_loads=[load(0, digest=bytes(32))]),
        "the grammar for grammar slot 0 has the SHA-256",
    ),
    "a body above the limit": (
        step_pb2.ExecuteModelRequest(grammar_loads=[load(0, bytes(MAX_GRAMMAR_BYTES + 1))]),
        "the grammar for grammar slot 0 has 262145 bytes; the limit is 262144",
    ),
    "a slot beyond them": (
        step_pb2.ExecuteModelRequest(grammar_loads=[load(256)]),
        "grammar slot 256 is loaded into; there are 256 slots",
    ),
    "a slot that is not empty": (
        step_pb2.ExecuteModelRequest(grammar_loads=[load(7)]),
        "grammar slot 7 is loaded into but not empty",
    ),
    "a drop in use": (step_pb2.ExecuteModelRequest(grammar_drops=[7]), "grammar slot 7 is dropped but slot 0 uses it"),
    "a drop of nothing": (step_pb2.ExecuteModelRequest(grammar_drops=[8]), "grammar slot 8 is dropped but empty"),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_step_that_breaks_the_rules_is_refused_and_changes_nothing(executor: Executor, what: str) -> None:
    change, words = REFUSED[what]
    epoch = (await attach(executor)).epoch
    await executor.stub.ExecuteModel(guided_step(epoch))
    step = step_pb2.ExecuteModelRequest(epoch=epoch, step_id=2, feature_bits=BITS)
    step.MergeFrom(change)
    code, details = await refusal(executor.stub.ExecuteModel(step))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details
    assert await run(executor, epoch, 2) == (ord("b"), b"")


async def test_an_admission_with_an_empty_slot_is_refused_and_an_attach_empties_all(executor: Executor) -> None:
    await executor.stub.ExecuteModel(guided_step((await attach(executor)).epoch))
    epoch = (await attach(executor)).epoch
    step = guided_step(epoch)
    del step.grammar_loads[:]
    _, details = await refusal(executor.stub.ExecuteModel(step))
    assert details.endswith("grammar slot 7 is used by slot 0 but empty")
    assert (await executor.stub.ExecuteModel(guided_step(epoch))).step_id == 1

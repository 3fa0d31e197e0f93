"""What was agreed on at Attach bounds what a step and its answer may have. Over gRPC: tests/skew."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from octavo.execution.v1 import capability_pb2, execution_service_pb2, step_pb2
from octavo_shared.errors import ExecutorFaultError, InvalidStepError
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo, common, names_of
from octavo_shared.step_wire.step import PoolingTask
from octavo_shared.step_wire.wire_agreement import (
    ADMISSION_FIELDS,
    ANSWER_FIELDS,
    STEP_FIELDS,
    WireAgreement,
    agreed_capabilities,
    agreed_parameters,
)
from octavo_shared.step_wire.wire_info import decode_parameters
from tests.support.each_row import each_row

Request = step_pb2.ExecuteModelRequest
Admission = step_pb2.Admission
Answer = step_pb2.ExecuteModelResponse

PROTO = Path(__file__).parents[4] / "protos/octavo/execution/v1/step.proto"
TOLD = re.compile(r"  // CAPABILITY_(\w+)[:,] .*\n(?:  //.*\n)*  (?:repeated |optional )?\w+ (\w+) = \d+;")

PLAIN = WireAgreement(2, frozenset({Capability.NUMERICS}))
EVERYTHING = WireAgreement(2, frozenset(Capability))


def test_capabilities_have_the_names_and_numbers_of_the_wire_and_fit_into_the_feature_bits() -> None:
    of_the_wire = {name.removeprefix("CAPABILITY_"): number for name, number in capability_pb2.Capability.items()}
    assert of_the_wire == {"UNSPECIFIED": 0} | {capability.name: capability.value for capability in Capability}
    assert max(Capability) < 64


@each_row(
    (Request, STEP_FIELDS, "feature_bits"),
    (Admission, ADMISSION_FIELDS, "traceparent"),
    (Answer, ANSWER_FIELDS, "feature_bits"),
)
def test_every_field_of_version_2_belongs_to_a_capability(
    message: type[Message], table: Mapping[str, Capability], last_plain_field: str
) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    may_be_ignored = {"move_duration_us"}.intersection(fields)
    later = {name for name, f in fields.items() if f.number > fields[last_plain_field].number}
    assert later == {*table} | may_be_ignored


def test_the_comments_of_the_fields_name_the_same_capabilities() -> None:
    told = {field: Capability[name] for name, field in TOLD.findall(PROTO.read_text())}
    assert told == STEP_FIELDS | ADMISSION_FIELDS | ANSWER_FIELDS


def test_of_capabilities_both_sides_have_those_that_are_common_to_both() -> None:
    assert common([1, 4, 40], frozenset({Capability.NUMERICS, Capability.ADAPTERS})) == {Capability.NUMERICS}
    assert names_of([40, 4, 1]) == "NUMERICS,GRAMMARS,40"
    assert len(names_of(range(10**6))) < 400


@each_row(
    (WireAgreement(), Request()),
    (WireAgreement(), Request(admissions=[Admission(slot=3)])),
    (PLAIN, Request(feature_bits=0)),
    (PLAIN, Request(feature_bits=0, admissions=[Admission(slot=3)])),
    (EVERYTHING, Request(feature_bits=0b11111111110)),
    (EVERYTHING, Request(feature_bits=1 << 4 | 1 << 5, grammar_drops=[0], admissions=[Admission(adapter_slot=0)])),
)
def test_a_step_within_what_was_agreed_on_is_accepted(agreement: WireAgreement, step: Request) -> None:
    step.epoch, step.step_id = 1, 7
    agreement.check_step(step)


@each_row(
    (WireAgreement(), Answer(), 0),
    (WireAgreement(), Answer(epoch=1, prompt_logprobs=bytes(4)), 0),
    (PLAIN, Answer(epoch=1, feature_bits=0), 0),
    (EVERYTHING, Answer(epoch=1, feature_bits=8, token_counts=b"\2"), 8),
)
def test_an_answer_within_what_was_agreed_on_is_accepted(
    agreement: WireAgreement, answer: Answer, sent_bits: int
) -> None:
    agreement.check_answer(answer, sent_bits)


@each_row(
    (PLAIN, Answer(), "step 0 was answered without feature_bits; wire version 2 was agreed on"),
    (PLAIN, Answer(feature_bits=0), "step 0 was answered with feature_bits 0x0, not 0x8"),
    (EVERYTHING, Answer(feature_bits=0, token_counts=b"\2"), "step 0 was answered with feature_bits 0x0, not 0x8"),
    (WireAgreement(), Answer(feature_bits=8), "step 0 was answered with feature_bits; wire version 1 was agreed on"),
    (PLAIN, Answer(feature_bits=8, token_counts=b"\2"), "the answer to step 0 has token_counts, but the capability"),
    (WireAgreement(), Answer(row_flags=b"\1"), "the answer to step 0 has row_flags, but the capability ROW_FLAGS"),
)
def test_an_answer_beyond_what_was_agreed_on_is_a_fault(agreement: WireAgreement, answer: Answer, words: str) -> None:
    with pytest.raises(ExecutorFaultError) as fault:
        agreement.check_answer(answer, 8)
    assert str(fault.value).startswith(words)


@each_row(
    (PLAIN, Request(feature_bits=0, allowances=[0, 2]), "has allowances, but the capability VARIABLE_TOKENS was not"),
    (
        PLAIN,
        Request(feature_bits=0, admissions=[Admission(), Admission(slot=3, encoder_input=step_pb2.EncoderInput())]),
        "has encoder_input in the admission to slot 3, but the capability ENCODER was not agreed on at Attach",
    ),
    (EVERYTHING, Request(feature_bits=1 << 40), "has bit 40 of feature_bits, but the capability 40 was not agreed"),
    (PLAIN, Request(feature_bits=1 << 4), "has bit 4 of feature_bits, but the capability GRAMMARS was not agreed"),
    (EVERYTHING, Request(feature_bits=1), "has bit 0 of feature_bits, but the capability 0 was not agreed"),
    (EVERYTHING, Request(feature_bits=2, allowances=[0, 2]), "has allowances, but not bit 3 of feature_bits, VARIABLE"),
    (EVERYTHING, Request(), "lacks feature_bits; wire version 2 was agreed on at Attach"),
    (WireAgreement(), Request(feature_bits=0), "has feature_bits; wire version 1 was agreed on at Attach"),
    (WireAgreement(), Request(grammar_drops=[0]), "has grammar_drops, but the capability GRAMMARS was not agreed"),
)
def test_a_step_beyond_what_was_agreed_on_is_refused_by_name(
    agreement: WireAgreement, step: Request, words: str
) -> None:
    step.epoch, step.step_id = 1, 7
    with pytest.raises(InvalidStepError) as refused:
        agreement.check_step(step)
    assert str(refused.value).startswith(f"step 7 {words}")


INFO = ExecutorInfo(
    "i", "m", "h", "float32", 16, 100, 3, 2048, 49152, 256, 4096, 2**22, (2,),
    num_grammar_slots=256, matcher_id="one", max_grammar_bytes=1000, pooling_tasks=frozenset(PoolingTask),
    embedding_size=384, num_scores=3, num_token_types=2,
)  # fmt: skip


@each_row(
    ([4, 9], {}, {4, 9}, (256, 1000)),
    ([4, 9], {"num_grammar_slots": 8, "max_grammar_bytes": 2000}, {4, 9}, (8, 1000)),
    ([4, 9], {"matcher_id": "one"}, {4, 9}, (256, 1000)),
    ([4, 9], {"matcher_id": "another"}, {9}, None),
    ([4], {}, set(), None),
    ([9], {}, {9}, None),
)
def test_grammars_are_agreed_only_with_row_flags_and_the_same_matcher_and_of_each_number_the_lesser_one(
    wanted: list[int], parameters: dict[str, Any], agreed: set[int], numbers: tuple[int, int] | None
) -> None:
    request = execution_service_pb2.AttachRequest(
        capabilities=wanted,  # type: ignore[arg-type]
        capability_parameters=capability_pb2.CapabilityParameters(**parameters),
    )

    capabilities = agreed_capabilities(request, INFO)
    found = agreed_parameters(request, INFO, capabilities)

    assert capabilities == agreed
    assert (None if found is None else (found.num_grammar_slots, found.max_grammar_bytes)) == numbers


def test_pooling_needs_nothing_else_and_what_is_agreed_on_says_what_the_model_is() -> None:
    request = execution_service_pb2.AttachRequest(capabilities=[Capability.POOLING.value])  # type: ignore[list-item]

    capabilities = agreed_capabilities(request, INFO)
    parameters = agreed_parameters(request, INFO, capabilities)

    assert capabilities == {Capability.POOLING}
    assert parameters is not None
    assert decode_parameters(parameters, capabilities) == decode_parameters(capability_pb2.CapabilityParameters()) | {
        "pooling_tasks": frozenset(PoolingTask), "embedding_size": 384, "num_scores": 3, "num_token_types": 2,
        "is_generative": True,
    }  # fmt: skip
    assert decode_parameters(parameters, frozenset()) == decode_parameters(capability_pb2.CapabilityParameters())

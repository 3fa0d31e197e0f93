"""What both sides agreed on at Attach, and the refusal, by name, of messages that go beyond it.

From wire version 2 on each step has `feature_bits`, the capabilities whose fields it has, and its answer repeats
them. So a field that a peer of another release does not know is never ignored in silence. Most steps have none of
these fields, which one look at the last field shows. Read next: docs/execution-wire.md.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from octavo.execution.v1 import capability_pb2, step_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.errors import ExecutorFaultError, InvalidStepError
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo, common, name_of
from octavo_shared.step_wire.wire_info import encode_parameters

# The capability of each field that belongs to one.
STEP_FIELDS = {
    "registered_blocks": Capability.NAMED_BLOCKS,
    "allowances": Capability.VARIABLE_TOKENS,
    "grammar_loads": Capability.GRAMMARS,
    "grammar_drops": Capability.GRAMMARS,
    "adapter_loads": Capability.ADAPTERS,
    "adapter_drops": Capability.ADAPTERS,
    "expected_weights_version": Capability.WEIGHT_VERSIONS,
    "blocks_to_send": Capability.BLOCK_TRANSFER,
    "blocks_to_receive": Capability.BLOCK_TRANSFER,
    "transfers_to_cancel": Capability.BLOCK_TRANSFER,
    "pooling_inputs": Capability.POOLING,
    "draft_counts": Capability.VARIABLE_TOKENS,
    "draft_token_ids": Capability.VARIABLE_TOKENS,
    "states_to_save": Capability.STATES,
    "keeps_live": Capability.WEIGHT_VERSIONS,
}
ADMISSION_FIELDS = {
    "grammar_slot": Capability.GRAMMARS,
    "adapter_slot": Capability.ADAPTERS,
    "encoder_input": Capability.ENCODER,
    "state_block": Capability.STATES,
}
# Of the sampling parameters of admissions and forks.
SAMPLING_FIELDS = {"no_repeat_ngram_size": Capability.NO_REPEAT_NGRAM}
ANSWER_FIELDS = {
    "token_counts": Capability.VARIABLE_TOKENS,
    "draft_counts": Capability.VARIABLE_TOKENS,
    "row_flags": Capability.ROW_FLAGS,
    "adapters_loaded": Capability.ADAPTERS,
    "weights_version": Capability.WEIGHT_VERSIONS,
    "arrived_transfers": Capability.BLOCK_TRANSFER,
    "sent_transfers": Capability.BLOCK_TRANSFER,
    "cancelled_transfers": Capability.BLOCK_TRANSFER,
    "lengths_digest": Capability.VARIABLE_TOKENS,
    "last_resolved_step_id": Capability.VARIABLE_TOKENS,
    "pooling_outputs": Capability.POOLING,
    "grammars_loaded": Capability.GRAMMARS_READY,
}

_FEATURE_BITS_OF_STEP = step_pb2.ExecuteModelRequest.DESCRIPTOR.fields_by_name["feature_bits"].number
_VERSION_OF_STEP = step_pb2.ExecuteModelRequest.DESCRIPTOR.fields_by_name["expected_weights_version"].number
_FEATURE_BITS_OF_ANSWER = step_pb2.ExecuteModelResponse.DESCRIPTOR.fields_by_name["feature_bits"].number


@dataclass(frozen=True, slots=True)
class WireAgreement:
    """The wire version and the capabilities of one attachment; with version 1 there are none."""

    version: int = 1
    capabilities: frozenset[Capability] = frozenset()

    @property
    def has_feature_bits(self) -> bool:
        """Whether every step and every answer has `feature_bits`."""
        return self.version >= 2

    def check_step(self, step: step_pb2.ExecuteModelRequest) -> None:
        """Accept a step, whose epoch is not 0, that needs nothing beyond the agreement.

        Raises: InvalidStepError: it needs more; nothing of it may be used.
        """
        # Fields are listed by number. Mostly the last one is `feature_bits`, and 0: nothing is to be looked up. Where
        # weights change, the version stands behind it, with its bit.
        *_, before, (last, value) = None, *step.ListFields()
        if last.number == _VERSION_OF_STEP and Capability.WEIGHT_VERSIONS in self.capabilities and before is not None:
            is_plain = before[0].number == _FEATURE_BITS_OF_STEP and before[1] == 1 << Capability.WEIGHT_VERSIONS
        else:
            is_plain = last.number == _FEATURE_BITS_OF_STEP and value == 0
        if is_plain and self.has_feature_bits and not (step.admissions or step.forks or step.beam_forks):
            return
        fields = list(_capability_fields(step))
        for name, capability in fields:
            if capability not in self.capabilities:
                raise InvalidStepError(f"step {step.step_id} has {name}, but {_not_agreed(capability)}")
        if step.HasField("feature_bits") != self.has_feature_bits:
            has = "lacks" if self.has_feature_bits else "has"
            raise InvalidStepError(
                f"step {step.step_id} {has} feature_bits; wire version {self.version} was agreed on at Attach"
            )
        self._check_bits(step, fields)

    def check_answer(self, answer: step_pb2.ExecuteModelResponse, sent_bits: int) -> None:
        """Accept an answer that repeats the feature bits of its step and has nothing beyond the agreement.

        Raises: ExecutorFaultError: it does not, or has more.
        """
        fields = answer.ListFields()
        if fields and self.has_feature_bits:
            last, value = fields[-1]
            if last.number == _FEATURE_BITS_OF_ANSWER and value == sent_bits:
                return
        for descriptor, _ in fields:
            capability = ANSWER_FIELDS.get(descriptor.name)
            if capability is not None and capability not in self.capabilities:
                raise ExecutorFaultError(
                    f"the answer to step {answer.step_id} has {descriptor.name}, but {_not_agreed(capability)}"
                )
        if answer.HasField("feature_bits") != self.has_feature_bits:
            how = "without" if self.has_feature_bits else "with"
            raise ExecutorFaultError(
                f"step {answer.step_id} was answered {how} feature_bits; wire version {self.version} was agreed on"
            )
        if self.has_feature_bits and answer.feature_bits != sent_bits:
            raise ExecutorFaultError(
                f"step {answer.step_id} was answered with feature_bits {answer.feature_bits:#x}, not {sent_bits:#x}"
            )

    def _check_bits(self, step: step_pb2.ExecuteModelRequest, fields: list[tuple[str, Capability]]) -> None:
        """Accept bits of agreed capabilities, the capabilities of the step's `fields` among them."""
        bits = step.feature_bits
        for number in range(bits.bit_length()):
            if bits >> number & 1 and number not in self.capabilities:
                raise InvalidStepError(
                    f"step {step.step_id} has bit {number} of feature_bits, but {_not_agreed(number)}"
                )
        for name, capability in fields:
            if not bits >> capability & 1:
                raise InvalidStepError(
                    f"step {step.step_id} has {name}, but not bit {capability} of feature_bits, {capability.name}"
                )


def _not_agreed(number: int) -> str:
    return f"the capability {name_of(number)} was not agreed on at Attach"


def _capability_fields(step: step_pb2.ExecuteModelRequest) -> Iterator[tuple[str, Capability]]:
    """Yield the fields of a step, of its admissions and of its forks that belong to a capability, in words."""
    for descriptor, _ in step.ListFields():
        if descriptor.name in STEP_FIELDS:
            yield descriptor.name, STEP_FIELDS[descriptor.name]
    for admission in step.admissions:
        for descriptor, _ in admission.ListFields():
            if descriptor.name in ADMISSION_FIELDS:
                yield f"{descriptor.name} in the admission to slot {admission.slot}", ADMISSION_FIELDS[descriptor.name]
    made_slots: list[step_pb2.Admission | step_pb2.Fork] = [*step.admissions, *step.beam_forks, *step.forks]
    for made in made_slots:
        for name, capability in SAMPLING_FIELDS.items():
            if getattr(made.sampling_params, name):
                yield f"{name} in the sampling parameters of slot {made.slot}", capability


def agreed_capabilities(request: pb.AttachRequest, info: ExecutorInfo) -> frozenset[Capability]:
    """Return the capabilities that both have; grammars only with row flags, and with the requested matcher.

    GRAMMARS_READY needs GRAMMARS, STATES and ENCODER need CACHE_GROUPS, WEIGHT_VERSIONS needs NUMERICS, and
    VARIABLE_TOKENS needs ROW_FLAGS, which say why a row has no token.
    """
    agreed = common(request.capabilities, info.capabilities)
    has_matcher = request.capability_parameters.matcher_id in ("", info.matcher_id)
    if not (Capability.ROW_FLAGS in agreed and has_matcher):
        agreed -= {Capability.GRAMMARS}
    if Capability.ROW_FLAGS not in agreed:
        agreed -= {Capability.VARIABLE_TOKENS}
    if Capability.CACHE_GROUPS not in agreed:
        agreed -= {Capability.STATES, Capability.ENCODER}
    if Capability.NUMERICS not in agreed:
        agreed -= {Capability.WEIGHT_VERSIONS}
    return agreed if Capability.GRAMMARS in agreed else agreed - {Capability.GRAMMARS_READY}


def agreed_parameters(
    request: pb.AttachRequest, info: ExecutorInfo, capabilities: AbstractSet[Capability]
) -> capability_pb2.CapabilityParameters | None:
    """Return the lesser of each number; a number that the scheduler omits is the executor's. None: there are none."""
    agreed = encode_parameters(info, capabilities)
    wanted = request.capability_parameters
    if agreed is not None and Capability.VARIABLE_TOKENS in capabilities:
        agreed.max_allowance = min(wanted.max_allowance or info.max_allowance, info.max_allowance)
        agreed.max_sample_rows = min(wanted.max_sample_rows or info.max_sample_rows, info.max_sample_rows)
    if agreed is not None and Capability.GRAMMARS in capabilities:
        agreed.num_grammar_slots = min(wanted.num_grammar_slots or info.num_grammar_slots, info.num_grammar_slots)
        agreed.max_grammar_bytes = min(wanted.max_grammar_bytes or info.max_grammar_bytes, info.max_grammar_bytes)
    if agreed is not None and Capability.ADAPTERS in capabilities:
        agreed.num_adapter_slots = min(wanted.num_adapter_slots or info.num_adapter_slots, info.num_adapter_slots)
        agreed.max_adapter_rank = min(wanted.max_adapter_rank or info.max_adapter_rank, info.max_adapter_rank)
    if agreed is not None and Capability.BLOCK_TRANSFER in capabilities:
        agreed.max_transfers = min(wanted.max_transfers or info.max_transfers, info.max_transfers)
    return agreed

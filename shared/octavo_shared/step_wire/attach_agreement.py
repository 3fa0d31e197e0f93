"""What both sides agree on at Attach: what the scheduler wants and the executor has; docs/execution-wire.md."""

from collections.abc import Set as AbstractSet

from octavo.execution.v1 import capability_pb2
from octavo.execution.v1 import execution_service_pb2 as pb
from octavo_shared.step_wire.capability import Capability, common
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.wire_info import encode_parameters


def agreed_capabilities(request: pb.AttachRequest, info: ExecutorInfo) -> frozenset[Capability]:
    """Return the capabilities that both have; grammars only with row flags, and with the requested matcher.

    GRAMMARS_READY needs GRAMMARS, and VARIABLE_TOKENS needs ROW_FLAGS, which say why a row has no token.
    """
    agreed = common(request.capabilities, info.capabilities)
    has_matcher = request.capability_parameters.matcher_id in ("", info.matcher_id)
    if not (Capability.ROW_FLAGS in agreed and has_matcher):
        agreed -= {Capability.GRAMMARS}
    if Capability.ROW_FLAGS not in agreed:
        agreed -= {Capability.VARIABLE_TOKENS}
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
    return agreed

"""Calls of the fleet as records. Each function makes one kind of record; `decoding.py` is the way back.

They run in the writer's thread, some time after the call: what they are given does not change any more.
"""

import dataclasses
import enum
import json
from dataclasses import replace
from typing import Any, TypeAlias

from octavo.execution.v1 import step_pb2
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import Int32Array, Step, StepResult
from octavo_shared.step_wire.wire import INT32, encode_result, encode_sampling, encode_step
from octavo_shared.step_wire.wire_rules import encode_rules
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.request.continuation_message import encode_continuation
from scheduler_svc.request.parameters import BeamSearchParams
from scheduler_svc.request.provenance import Numerics
from scheduler_svc.step_log.masking import TokenMask

Mask: TypeAlias = TokenMask | None


def core_joined(mask: Mask, *description: Any) -> pb.LogRecord:
    """A planner joined."""
    return pb.LogRecord(core_joined=core_message(mask, *description))


def core_message(
    mask: Mask,
    number: int,
    epoch: int,
    name: str,
    limits: CoreLimits,
    numerics: Numerics,
    info: ExecutorInfo | None,
) -> pb.CoreJoined:
    """Describe a planner."""
    return pb.CoreJoined(
        core=number,
        epoch=epoch,
        name=name,
        limits_json=_json(limits, mask),
        info_json="" if info is None else _json(info, mask),
        numerics_id=numerics.numerics_id,
        weights_digest=numerics.weights_digest,
    )


def blocks_kept(mask: Mask, number: int, block_ids: Int32Array, names: bytes) -> pb.LogRecord:
    """A planner found blocks again."""
    return pb.LogRecord(blocks_kept=pb.BlocksKept(core=number, block_ids=block_ids.tolist(), names=names))


def core_left(mask: Mask, number: int) -> pb.LogRecord:
    """A planner left."""
    return pb.LogRecord(core_left=pb.CoreNumber(core=number))


def core_forgotten(mask: Mask, number: int) -> pb.LogRecord:
    """A planner was forgotten."""
    return pb.LogRecord(core_forgotten=pb.CoreNumber(core=number))


def tenants_changed(mask: Mask, shares: TenantShares) -> pb.LogRecord:
    """Tenants have other shares."""
    return pb.LogRecord(tenants_changed=encode_shares(shares))


def encode_shares(shares: TenantShares) -> pb.TenantShares:
    """Return the message of the shares of tenants."""
    return pb.TenantShares(
        named=[_encode_share(tenant, share) for tenant, share in shares.named.items()],
        others=_encode_share("", shares.others),
    )


def _encode_share(tenant: str, share: TenantShare) -> pb.TenantShare:
    return pb.TenantShare(tenant=tenant, weight=share.weight, max_num_seqs=share.max_num_seqs)


def takes_groups(mask: Mask, number: int, value: bool) -> pb.LogRecord:
    """Whether a planner takes groups."""
    return pb.LogRecord(takes_groups=pb.CoreFlag(core=number, value=value))


def draining(mask: Mask, number: int, value: bool) -> pb.LogRecord:
    """Whether a planner gives its groups to others."""
    return pb.LogRecord(draining=pb.CoreFlag(core=number, value=value))


def probing(mask: Mask, number: int, value: bool) -> pb.LogRecord:
    """Whether a planner is in doubt."""
    return pb.LogRecord(probing=pb.CoreFlag(core=number, value=value))


def step_cost(mask: Mask, number: int, cost: StepCost) -> pb.LogRecord:
    """What was learned of an executor; `cost` is a copy."""
    return pb.LogRecord(
        step_cost=pb.StepCostSet(
            core=number,
            slack=cost.slack,
            classes=[size for known in cost.slowest_s for size in known],
            slowest_s=list(cost.slowest_s.values()),
            kinds=[sum(flag << bit for bit, flag in enumerate(kind)) for kind in sorted(cost.kinds)],
            token_sums=cost.token_sums,
            row_sums=cost.row_sums,
            row_tokens=cost.row_tokens,
        )
    )


def hang_noted(mask: Mask, number: int) -> pb.LogRecord:
    """A step hung."""
    return pb.LogRecord(hang_noted=pb.CoreNumber(core=number))


def group_added(mask: Mask, group: SequenceGroup, matcher_id: str) -> pb.LogRecord:
    """A new group waits; `matcher_id` is its one now, which its admission may change before this is written."""
    conditions = group.stop_conditions if mask is None else mask.conditions(group.stop_conditions)
    prompt = group.prompt_token_ids if mask is None else mask.ids(group.prompt_token_ids)
    rules = group.token_rules if mask is None else mask.rules(group.token_rules)
    grammar = group.grammar if mask is None or group.grammar is None else mask.grammar(group.grammar)
    continuation = group.continuation
    if mask is not None and continuation is not None:
        outputs = [replace(output, token_ids=mask.ids(output.token_ids)) for output in continuation.outputs]
        continuation = replace(continuation, outputs=tuple(outputs))
    return pb.LogRecord(
        group_added=pb.GroupAdded(
            arrival=group.arrival,
            request_id=group.request_id,
            prompt_token_ids=prompt.astype(INT32, copy=False).tobytes(),
            sampling=encode_sampling(group.sampling),
            token_rules=None if rules is None else encode_rules(rules),
            max_tokens=conditions.max_tokens,
            stop_token_ids=sorted(conditions.stop_token_ids),
            ignore_eos=conditions.ignore_eos,
            accepted_len=conditions.accepted_len,
            num_sequences=group.num_sequences,
            beam_search=None if group.beam_search is None else _beam_search(group.beam_search),
            priority=group.priority,
            tenant=group.tenant,
            cache_salt=group.cache_salt,
            num_prompt_logprobs=group.num_prompt_logprobs,
            traceparent=group.traceparent,
            continuation=None if continuation is None else encode_continuation(continuation),
            requires_same_numerics=group.requires_same_numerics,
            grammar=b"" if grammar is None else grammar.body,
            matcher_id=matcher_id,
            pooling_task=None if group.pooling is None else step_pb2.PoolingTask.ValueType(group.pooling),
            token_type_ids=group.token_type_ids,
        )
    )


def group_added_again(mask: Mask, arrival: int) -> pb.LogRecord:
    """A group waits again."""
    return pb.LogRecord(group_added_again=pb.GroupNumber(arrival=arrival))


def group_withdrawn(mask: Mask, arrival: int) -> pb.LogRecord:
    """A group was taken out of the queue."""
    return pb.LogRecord(group_withdrawn=pb.GroupNumber(arrival=arrival))


def group_aborted(mask: Mask, arrival: int) -> pb.LogRecord:
    """A group was ended."""
    return pb.LogRecord(group_aborted=pb.GroupNumber(arrival=arrival))


def sequence_finished(mask: Mask, number: int, arrival: int, index: int) -> pb.LogRecord:
    """An output was ended by a stop string."""
    return pb.LogRecord(sequence_finished=pb.SequenceFinished(core=number, arrival=arrival, output_index=index))


def loss_noted(mask: Mask, arrival: int, executor: str) -> pb.LogRecord:
    """A group lost its executor."""
    return pb.LogRecord(loss_noted=pb.LossNoted(arrival=arrival, executor=executor))


def loss_forgiven(mask: Mask, arrival: int) -> pb.LogRecord:
    """A group had a token since."""
    return pb.LogRecord(loss_forgiven=pb.GroupNumber(arrival=arrival))


def runs_alone(mask: Mask, arrival: int, value: bool) -> pb.LogRecord:
    """Whether a group is computed alone."""
    return pb.LogRecord(runs_alone=pb.GroupFlag(arrival=arrival, value=value))


def step_decided(
    mask: Mask, number: int, now_s: float, is_complete: bool, step: Step | None, failed: list[int]
) -> pb.LogRecord:
    """A planner decided."""
    if step is not None and mask is not None:
        step = mask.step(step)
    message = None if step is None else encode_step(step)
    decided = pb.StepDecided(core=number, now_s=now_s, is_complete=is_complete, step=message, failed_arrivals=failed)
    return pb.LogRecord(step_decided=decided)


def groups_dispatched(mask: Mask, now_s: float, is_complete: bool) -> pb.LogRecord:
    """Waiting groups were dispatched."""
    return pb.LogRecord(groups_dispatched=pb.GroupsDispatched(now_s=now_s, is_complete=is_complete))


def result_taken(mask: Mask, number: int, result: StepResult) -> pb.LogRecord:
    """A planner took a result."""
    taken = encode_result(result if mask is None else mask.result(result))
    return pb.LogRecord(result_taken=pb.ResultTaken(core=number, result=taken))


def _beam_search(params: BeamSearchParams) -> pb.BeamSearchParams:
    return pb.BeamSearchParams(
        beam_width=params.beam_width,
        num_outputs=params.num_outputs,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping.value,
    )


def _json(value: CoreLimits | ExecutorInfo, mask: Mask) -> str:
    """Return the fields of a description that have not their default value."""
    values = {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING or getattr(value, field.name) != field.default
    }
    if mask is not None and "eos_token_ids" in values:
        values["eos_token_ids"] = mask.id_tuple(values["eos_token_ids"])
    return json.dumps(values, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value)

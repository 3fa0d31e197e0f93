"""What records hold, both ways: the values that a fleet takes and returns, and their messages.

Messages are made in the writer's thread, some time after the call: what they are made of does not change any more. A
log is data that anybody may have written: what is read is checked.
"""

import collections.abc
import dataclasses
import enum
import json
import types
import typing
from typing import Any, TypeAlias, TypeVar

import numpy as np

from octavo.execution.v1 import step_pb2
from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.sampling_params_table import MAX_ALTERNATIVES
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN, ExecutorInfo
from octavo_shared.step_wire.step import ADAPTER_DIGEST_BYTES, Adapter, PoolingTask, Step, StepResult
from octavo_shared.step_wire.wire import INT32, decode_sampling, encode_result, encode_sampling, encode_step
from octavo_shared.step_wire.wire_rules import decode_rules, encode_rules
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_cost import StepCost
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.request.continuation_message import decode_continuation, encode_continuation
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from scheduler_svc.request.provenance import Numerics
from scheduler_svc.step_log.masking import TokenMask

# None: tokens stay.
Mask: TypeAlias = TokenMask | None
_Value = TypeVar("_Value")
_Described = TypeVar("_Described", CoreLimits, ExecutorInfo)

# What a log may ask of whoever replays it: about a gigabyte for the pools of all executors, counted in blocks.
MAX_BLOCKS = 2**24
_BLOCKS_OF_A_SLOT = 64
MAX_OUTPUTS = 2**16
_MAX_BEAM_WIDTH = 2**12
# Of a tenant: what was computed for it, divided by it, does not overflow.
_MAX_WEIGHT = 1e30
# Of an executor: the least and the most of what is counted.
_SIZES = {
    "block_size": (1, 2**16),
    "max_num_seqs": (1, MAX_BLOCKS),
    "max_model_len": (1, MAX_MODEL_LEN),
    "max_allowance": (1, MAX_ALLOWANCE),
    "max_sample_rows": (0, MAX_BLOCKS),
    "num_blocks": (0, MAX_BLOCKS),
    "num_state_blocks": (0, MAX_BLOCKS),
    "num_host_state_blocks": (0, MAX_BLOCKS),
    "num_grammar_slots": (0, 2**16),
    "num_encoder_blocks": (0, MAX_BLOCKS),
    "num_encoder_host_blocks": (0, MAX_BLOCKS),
}


def _masked(mask: Mask, value: _Value) -> _Value:
    return value if mask is None else mask.masked(value)


# Planners --------------------------------------------------------------------------------------------


def encode_planner(mask: Mask, number: int, planner: ExecutorPlanner) -> pb.CoreJoined:
    """Describe a planner."""
    return pb.CoreJoined(
        core=number,
        epoch=planner.epoch,
        name=planner.name,
        limits_json=_json(_masked(mask, planner.limits)),
        info_json="" if planner.info is None else _json(_masked(mask, planner.info)),
        numerics_id=planner.numerics.numerics_id,
        weights_digest=planner.numerics.weights_digest,
    )


def join(fleet: Fleet, message: pb.CoreJoined) -> ExecutorPlanner:
    """Let a planner join a fleet. Raises ValueError: it is nothing known here, or too large beside the others."""
    limits, info = decode_limits(message), decode_info(message)
    if sum(_num_blocks(known) for known in (limits, *(planner.limits for planner in fleet.planners))) > MAX_BLOCKS:
        raise ValueError(f"the executors of the log have more than the {MAX_BLOCKS} blocks that are replayed")
    numerics = Numerics(message.numerics_id, message.weights_digest)
    return fleet.join(limits, message.epoch, message.name, numerics, info)


def _num_blocks(limits: CoreLimits) -> int:
    num_blocks = sum(pool.num_blocks + pool.num_host_blocks for pool in limits.groups)
    num_states = limits.num_state_blocks + limits.num_host_state_blocks
    num_blocks += limits.num_encoder_blocks + limits.num_encoder_host_blocks
    return num_blocks + num_states + _BLOCKS_OF_A_SLOT * limits.max_num_seqs


def decode_limits(message: pb.CoreJoined) -> CoreLimits:
    """Return the limits of a planner. Raises ValueError: this release knows other ones."""
    limits = _described(CoreLimits, message.limits_json)
    for name, (least, most) in _SIZES.items():
        if not least <= (found := getattr(limits, name)) <= most:
            raise ValueError(f"an executor of the log has {name} {found}; it is from {least} to {most}")
    if not all(1 <= pool.num_blocks <= MAX_BLOCKS for pool in limits.more_groups):
        raise ValueError(f"a cache group of the log has more than {MAX_BLOCKS} blocks, or none")
    if not all(0 <= pool.num_host_blocks <= MAX_BLOCKS for pool in limits.groups):
        raise ValueError(f"a cache group of the log has more than {MAX_BLOCKS} host blocks, or less than none")
    return limits


def decode_info(message: pb.CoreJoined) -> ExecutorInfo | None:
    """Return what an executor said of itself; None: nobody asked. Raises ValueError: it is nothing known here."""
    return _described(ExecutorInfo, message.info_json) if message.info_json else None


def encode_step_cost(number: int, cost: StepCost) -> pb.StepCostSet:
    """Return the message of what was learned of the executor of a planner."""
    return pb.StepCostSet(
        core=number,
        slack=cost.slack,
        classes=[size for known in cost.slowest_s for size in known],
        slowest_s=list(cost.slowest_s.values()),
        kinds=[sum(flag << bit for bit, flag in enumerate(kind)) for kind in sorted(cost.kinds)],
        token_sums=cost.token_sums,
        row_sums=cost.row_sums,
        row_tokens=cost.row_tokens,
    )


def decode_step_cost(message: pb.StepCostSet) -> StepCost:
    """Return what was learned of an executor. Raises ValueError: some of it is missing."""
    classes = zip(message.classes[::2], message.classes[1::2], strict=True)
    cost = StepCost()
    cost.slack = message.slack
    cost.slowest_s = dict(zip(classes, message.slowest_s, strict=True))
    cost.kinds = {(bool(kind & 1), bool(kind & 2), bool(kind & 4)) for kind in message.kinds}
    if message.token_sums:  # logs of earlier releases have none
        num, sizes, durations, squares, products = message.token_sums
        cost.token_sums = num, sizes, durations, squares, products
        num, sizes, durations, squares, products = message.row_sums
        cost.row_sums = num, sizes, durations, squares, products
        cost.row_tokens = message.row_tokens
    return cost


# Tenants ---------------------------------------------------------------------------------------------


def encode_shares(shares: TenantShares) -> pb.TenantShares:
    """Return the message of the shares of tenants."""
    return pb.TenantShares(
        named=[_encode_share(tenant, share) for tenant, share in shares.named.items()],
        others=_encode_share("", shares.others),
    )


def _encode_share(tenant: str, share: TenantShare) -> pb.TenantShare:
    return pb.TenantShare(tenant=tenant, weight=share.weight, max_num_seqs=share.max_num_seqs)


def decode_shares(message: pb.TenantShares) -> TenantShares:
    """Return what tenants may have. Raises ValueError: no scheduler gives them that."""
    named = {share.tenant: _decode_share(share) for share in message.named}
    return TenantShares(named, _decode_share(message.others))


def _decode_share(message: pb.TenantShare) -> TenantShare:
    most = message.max_num_seqs if message.HasField("max_num_seqs") else None
    if not 1 / _MAX_WEIGHT <= message.weight <= _MAX_WEIGHT or most == 0:
        raise ValueError("a tenant of the log has a share that no scheduler gives")
    return TenantShare(message.weight, most)


# Groups ----------------------------------------------------------------------------------------------


def encode_group(mask: Mask, group: SequenceGroup, matcher_id: str) -> pb.GroupAdded:
    """Return the message of a new group; `matcher_id` is its one when it was added: its admission may change it."""
    conditions, rules = _masked(mask, group.stop_conditions), _masked(mask, group.token_rules)
    grammar, continuation = _masked(mask, group.grammar), _masked(mask, group.continuation)
    prompt = group.prompt_token_ids if mask is None else mask.ids(group.prompt_token_ids)
    search, adapter = group.beam_search, group.adapter
    attended = group.encoder_token_ids
    if attended is not None and mask is not None:
        attended = mask.ids(attended)
    return pb.GroupAdded(
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
        beam_search=None
        if search is None
        else pb.BeamSearchParams(
            beam_width=search.beam_width,
            num_outputs=search.num_outputs,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping.value,
        ),
        priority=group.priority,
        tenant=group.tenant,
        cache_salt=group.cache_salt,
        speculate=None if group.speculate else False,
        num_prompt_logprobs=group.num_prompt_logprobs,
        traceparent=group.traceparent,
        continuation=None if continuation is None else encode_continuation(continuation),
        requires_same_numerics=group.requires_same_numerics,
        grammar=b"" if grammar is None else grammar.body,
        matcher_id=matcher_id,
        adapter=None
        if adapter is None
        else pb.Adapter(source=adapter.source, digest=adapter.digest, attempt=adapter.attempt),
        pooling_task=None if group.pooling is None else step_pb2.PoolingTask.ValueType(group.pooling),
        token_type_ids=group.token_type_ids,
        encoder_token_ids=b"" if attended is None else attended.astype(INT32, copy=False).tobytes(),
    )


def decode_group(message: pb.GroupAdded) -> SequenceGroup:
    """Return a new group. Raises ValueError: it is none that a scheduler takes."""
    if not 1 <= message.num_sequences <= MAX_OUTPUTS:  # before there are so many
        raise ValueError(f"a request of the log has {message.num_sequences} outputs; it has from 1 to {MAX_OUTPUTS}")
    if message.grammar and message.HasField("beam_search"):
        raise ValueError("a request of the log has a grammar and beams, which follow none")
    if message.HasField("adapter") and len(message.adapter.digest) not in (0, ADAPTER_DIGEST_BYTES):
        raise ValueError("a request of the log has an adapter without a digest of its content")
    if message.HasField("pooling_task") and (message.num_sequences > 1 or message.HasField("beam_search")):
        raise ValueError("a text of the log has several answers")

    def optional(name: str) -> Any:
        return getattr(message, name) if message.HasField(name) else None  # type: ignore[arg-type]

    search, rules, continuation = optional("beam_search"), optional("token_rules"), optional("continuation")
    adapter = optional("adapter")
    group = SequenceGroup(
        request_id=message.request_id,
        prompt_token_ids=np.frombuffer(message.prompt_token_ids, INT32).astype(np.int32),
        sampling=decode_sampling(message.sampling),
        stop_conditions=StopConditions(
            max_tokens=optional("max_tokens"),
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            accepted_len=optional("accepted_len"),
        ),
        arrival=message.arrival,
        num_sequences=message.num_sequences,
        beam_search=search
        and BeamSearchParams(
            search.beam_width, search.num_outputs, search.length_penalty, EarlyStopping(search.early_stopping)
        ),
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        speculate=message.speculate if message.HasField("speculate") else True,
        token_rules=rules and decode_rules(rules),
        num_prompt_logprobs=message.num_prompt_logprobs,
        traceparent=optional("traceparent"),
        continuation=continuation and decode_continuation(continuation),
        requires_same_numerics=message.requires_same_numerics,
        grammar=Grammar(message.grammar) if message.grammar else None,
        matcher_id=message.matcher_id,
        adapter=adapter and Adapter(adapter.source, adapter.digest, adapter.attempt),
        pooling=PoolingTask(message.pooling_task) if message.HasField("pooling_task") else None,
        token_type_ids=message.token_type_ids,
        encoder_token_ids=np.frombuffer(message.encoder_token_ids, INT32).astype(np.int32)
        if message.encoder_token_ids
        else None,
    )
    check_group(group)
    return group


def check_group(group: SequenceGroup) -> None:
    """See that a group asks for no more numbers than a scheduler lets it. Raises ValueError."""
    asked = max(group.num_prompt_logprobs, group.sampling.num_logprobs)
    width = group.beam_search.beam_width if group.beam_search is not None else 1
    if asked > MAX_ALTERNATIVES or width > _MAX_BEAM_WIDTH or not 1 <= group.num_sequences <= MAX_OUTPUTS:
        raise ValueError(f"request {group.arrival} of the log asks for more than a scheduler gives")


# Steps -----------------------------------------------------------------------------------------------


def encode_decision(
    mask: Mask, number: int, now_s: float, is_complete: bool, step: Step | None, failed: list[int]
) -> pb.StepDecided:
    """Return the message of what a planner decided: a step or none, and the arrivals of groups that failed."""
    message = None if step is None else encode_step(_masked(mask, step))
    return pb.StepDecided(core=number, now_s=now_s, is_complete=is_complete, step=message, failed_arrivals=failed)


def encode_taken(mask: Mask, number: int, result: StepResult) -> pb.ResultTaken:
    """Return the message of a result that a planner took."""
    return pb.ResultTaken(core=number, result=encode_result(_masked(mask, result)))


# Descriptions as JSON --------------------------------------------------------------------------------


def _json(value: CoreLimits | ExecutorInfo) -> str:
    """Return the fields of a description that have not their default value."""
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    defaults = {field.name: field.default for field in dataclasses.fields(value)}
    return json.dumps({name: one for name, one in values.items() if one != defaults[name]}, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset):
        return sorted(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else dict(value)  # type: ignore[arg-type]


def _described(kind: type[_Described], text: str) -> _Described:
    described: _Described = _restored(kind.__name__, kind, json.loads(text))
    return described


def _restored(name: str, hint: Any, value: Any) -> Any:
    """Return a value of JSON as the type that a field has. Raises ValueError: it is of another one."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.UnionType:
        [inner] = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _restored(name, inner, value)
    if origin in (tuple, frozenset) and isinstance(value, list):
        return origin(_restored(name, arguments[0], item) for item in value)
    if origin is collections.abc.Mapping and isinstance(value, dict):
        return {key: _restored(name, arguments[1], item) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin(value)
    if dataclasses.is_dataclass(origin) and isinstance(value, dict):
        hints = typing.get_type_hints(origin)
        if unknown := sorted(value.keys() - origin.__dataclass_fields__.keys()):
            raise ValueError(f"{hint.__name__} has no {', '.join(unknown)} in this release")
        return hint(**{inner: _restored(inner, hints[inner], item) for inner, item in value.items()})
    is_number = origin is float and type(value) is int
    if (type(value) is not origin and not is_number) or (origin is int and not 0 <= value < 2**63):
        raise ValueError(f"{name} of an executor of the log is not what this release knows")
    return value

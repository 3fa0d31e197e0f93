"""What a record holds, as the values that the fleet takes; `encoding.py` wrote it."""

import collections.abc
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from octavo.steplog.v1 import step_log_pb2 as pb
from octavo.values.sampling_params_table import MAX_ALTERNATIVES
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from octavo_shared.step_wire.executor_info import MAX_MODEL_LEN, ExecutorInfo
from octavo_shared.step_wire.step import PoolingTask
from octavo_shared.step_wire.wire import INT32, decode_sampling
from octavo_shared.step_wire.wire_rules import decode_rules
from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.step_cost import StepCost, Sums
from scheduler_svc.core.waiting.tenant_shares import TenantShare, TenantShares
from scheduler_svc.request.continuation_message import decode_continuation
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from scheduler_svc.request.provenance import Numerics

Described = TypeVar("Described", CoreLimits, ExecutorInfo)


# What a log may ask of whoever replays it: about a gigabyte for the pools of all executors, counted in blocks.
MAX_BLOCKS = 2**24
_BLOCKS_OF_A_SLOT = 64
_MAX_BLOCK_SIZE = 2**16
MAX_OUTPUTS = 2**16
_MAX_BEAM_WIDTH = 2**12
# Of a tenant: what was computed for it, divided by it, does not overflow.
_MAX_WEIGHT = 1e30
_MAX_GRAMMAR_SLOTS = 2**16


def join(fleet: Fleet, message: pb.CoreJoined) -> ExecutorPlanner:
    """Let a planner join a fleet. Raises ValueError: it is nothing known here, or too large beside the others."""
    limits, info = decode_limits(message), decode_info(message)
    if sum(_num_blocks(known) for known in (limits, *(planner.limits for planner in fleet.planners))) > MAX_BLOCKS:
        raise ValueError(f"the executors of the log have more than the {MAX_BLOCKS} blocks that are replayed")
    numerics = Numerics(message.numerics_id, message.weights_digest)
    return fleet.join(limits, message.epoch, message.name, numerics, info)


def _num_blocks(limits: CoreLimits) -> int:
    num_blocks = sum(pool.num_blocks + pool.num_host_blocks for pool in limits.groups)
    return num_blocks + _BLOCKS_OF_A_SLOT * limits.max_num_seqs


def decode_limits(message: pb.CoreJoined) -> CoreLimits:
    """Return the limits of a planner. Raises ValueError: this release knows other ones."""
    limits = _from_json(CoreLimits, message.limits_json)
    for name, least, most in (
        ("block_size", 1, _MAX_BLOCK_SIZE),
        ("max_num_seqs", 1, MAX_BLOCKS),
        ("max_model_len", 1, MAX_MODEL_LEN),
        ("max_allowance", 1, MAX_ALLOWANCE),
        ("max_sample_rows", 0, MAX_BLOCKS),
        ("num_blocks", 0, MAX_BLOCKS),
        ("num_grammar_slots", 0, _MAX_GRAMMAR_SLOTS),
    ):
        if not least <= (found := getattr(limits, name)) <= most:
            raise ValueError(f"an executor of the log has {name} {found}; it is from {least} to {most}")
    if not all(1 <= pool.num_blocks <= MAX_BLOCKS for pool in limits.more_groups):
        raise ValueError(f"a cache group of the log has more than {MAX_BLOCKS} blocks, or none")
    if not all(0 <= pool.num_host_blocks <= MAX_BLOCKS for pool in limits.groups):
        raise ValueError(f"a cache group of the log has more than {MAX_BLOCKS} host blocks, or less than none")
    return limits


def decode_info(message: pb.CoreJoined) -> ExecutorInfo | None:
    """Return what an executor said of itself; None: nobody asked. Raises ValueError: it is nothing known here."""
    return _from_json(ExecutorInfo, message.info_json) if message.info_json else None


def decode_shares(message: pb.TenantShares) -> TenantShares:
    """Return what tenants may have. Raises ValueError: no scheduler gives them that."""
    named = {share.tenant: _decode_share(share) for share in message.named}
    return TenantShares(named, _decode_share(message.others))


def _decode_share(message: pb.TenantShare) -> TenantShare:
    most = message.max_num_seqs if message.HasField("max_num_seqs") else None
    if not 1 / _MAX_WEIGHT <= message.weight <= _MAX_WEIGHT or most == 0:
        raise ValueError("a tenant of the log has a share that no scheduler gives")
    return TenantShare(message.weight, most)


def decode_step_cost(message: pb.StepCostSet) -> StepCost:
    """Return what was learned of an executor."""
    classes = zip(message.classes[::2], message.classes[1::2], strict=True)
    cost = StepCost()
    cost.slack = message.slack
    cost.slowest_s = dict(zip(classes, message.slowest_s, strict=True))
    cost.kinds = {(bool(kind & 1), bool(kind & 2), bool(kind & 4)) for kind in message.kinds}
    if message.token_sums:  # logs of earlier releases have none
        cost.token_sums, cost.row_sums = _sums(message.token_sums), _sums(message.row_sums)
        cost.row_tokens = message.row_tokens
    return cost


def _sums(values: Iterable[float]) -> Sums:
    """Return the sums over steps. Raises ValueError: they are not so many."""
    num, sizes, durations, squares, products = values
    return num, sizes, durations, squares, products


def decode_group(message: pb.GroupAdded) -> SequenceGroup:
    """Return a new group. Raises ValueError: it is none that a scheduler takes."""
    search = message.beam_search
    if not 1 <= message.num_sequences <= MAX_OUTPUTS:  # before there are so many
        raise ValueError(f"a request of the log has {message.num_sequences} outputs; it has from 1 to {MAX_OUTPUTS}")
    if message.grammar and message.HasField("beam_search"):
        raise ValueError("a request of the log has a grammar and beams, which follow none")
    if message.HasField("pooling_task") and (message.num_sequences > 1 or message.HasField("beam_search")):
        raise ValueError("a text of the log has several answers")
    group = SequenceGroup(
        request_id=message.request_id,
        prompt_token_ids=np.frombuffer(message.prompt_token_ids, INT32).astype(np.int32),
        sampling=decode_sampling(message.sampling),
        stop_conditions=StopConditions(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            accepted_len=message.accepted_len if message.HasField("accepted_len") else None,
        ),
        arrival=message.arrival,
        num_sequences=message.num_sequences,
        beam_search=BeamSearchParams(
            search.beam_width, search.num_outputs, search.length_penalty, EarlyStopping(search.early_stopping)
        )
        if message.HasField("beam_search")
        else None,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        token_rules=decode_rules(message.token_rules) if message.HasField("token_rules") else None,
        num_prompt_logprobs=message.num_prompt_logprobs,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
        continuation=decode_continuation(message.continuation) if message.HasField("continuation") else None,
        requires_same_numerics=message.requires_same_numerics,
        grammar=Grammar(message.grammar) if message.grammar else None,
        matcher_id=message.matcher_id,
        pooling=PoolingTask(message.pooling_task) if message.HasField("pooling_task") else None,
        token_type_ids=message.token_type_ids,
    )
    check_group(group)
    return group


def check_group(group: SequenceGroup) -> None:
    """See that a group asks for no more numbers than a scheduler lets it. Raises ValueError."""
    asked = max(group.num_prompt_logprobs, group.sampling.num_logprobs)
    width = group.beam_search.beam_width if group.beam_search is not None else 1
    if asked > MAX_ALTERNATIVES or width > _MAX_BEAM_WIDTH or not 1 <= group.num_sequences <= MAX_OUTPUTS:
        raise ValueError(f"request {group.arrival} of the log asks for more than a scheduler gives")


def _from_json(kind: type[Described], text: str) -> Described:
    described: Described = _described(kind, json.loads(text))
    return described


def _described(kind: Any, values: Any) -> Any:
    """Return a dataclass of what JSON says of its fields. Raises ValueError: this release knows other ones."""
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} of the log is no object of JSON")
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(kind)}):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)} in this release")
    return kind(**{name: _restored(name, hints[name], value) for name, value in values.items()})


def _restored(name: str, hint: Any, value: Any) -> Any:
    """Return a value of JSON as the type that a field has. Raises ValueError: it is of another one."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is types.UnionType:
        [inner] = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _restored(name, inner, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_restored(name, arguments[0], item) for item in value)
    if origin is frozenset and isinstance(value, list):
        return frozenset(_restored(name, arguments[0], item) for item in value)
    if origin is collections.abc.Mapping and isinstance(value, dict):
        return {key: _restored(name, arguments[1], item) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return origin(value)
    if dataclasses.is_dataclass(origin):
        return _described(origin, value)
    is_number = origin is float and type(value) is int
    if (type(value) is not origin and not is_number) or (origin is int and not 0 <= value < 2**63):
        raise ValueError(f"{name} of an executor of the log is not what this release knows")
    return value

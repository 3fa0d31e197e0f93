"""What a record holds, as the values that the fleet takes; `encoding.py` wrote it."""

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from octavo.steplog.v1 import step_log_pb2 as pb
from scheduler_svc.continuation_message import decode_continuation
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.step_cost import StepCost, Sums
from scheduler_svc.request.parameters import BeamSearchParams, EarlyStopping, StopConditions
from shared.executor_info import ExecutorInfo
from shared.wire import INT32, decode_sampling
from shared.wire_rules import decode_rules

Described = TypeVar("Described", CoreLimits, ExecutorInfo)


def decode_limits(message: pb.CoreJoined) -> CoreLimits:
    """Return the limits of a core. Raises ValueError: this release knows other ones."""
    return _from_json(CoreLimits, message.limits_json)


def decode_info(message: pb.CoreJoined) -> ExecutorInfo | None:
    """Return what an executor said of itself; None: nobody asked. Raises ValueError: it is nothing known here."""
    return _from_json(ExecutorInfo, message.info_json) if message.info_json else None


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
    """Return a new group."""
    search = message.beam_search
    return SequenceGroup(
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
    )


def _from_json(kind: type[Described], text: str) -> Described:
    hints = typing.get_type_hints(kind)
    values = json.loads(text)
    if unknown := sorted(values.keys() - {field.name for field in dataclasses.fields(kind)}):
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)} in this release")
    return kind(**{name: _restored(hints[name], value) for name, value in values.items()})


def _restored(hint: Any, value: Any) -> Any:
    """Return a value of JSON as the type that a field has."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for kind in kinds:
        if isinstance(kind, type) and issubclass(kind, enum.Enum) and value is not None:
            return kind(value)
    return tuple(value) if isinstance(value, list) else value

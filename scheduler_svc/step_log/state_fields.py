"""What of a fleet its decisions depend on: the closed table of classes and their fields that a snapshot has.

What a class gets from `Fleet.join` and never changes is not here. A field that is missing shows in replay, which
decides otherwise (`tests/property/test_step_log.py`).
"""

import functools
import typing
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.values.sampling_parameters import MAX_ALTERNATIVES
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable, IndexArray, StepLayout
from octavo_shared.step_wire.delta_check import MAX_ALLOWANCE
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW
from octavo_shared.step_wire.step import Admission, BoolArray, Int32Array, PoolingInput, Step, TableDelta
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.beam_search import BeamSearch, Candidates
from scheduler_svc.core.blocks.block_allocator import BlockAllocator
from scheduler_svc.core.blocks.eviction_order import EvictionOrder
from scheduler_svc.core.blocks.group_blocks import GroupBlocks
from scheduler_svc.core.blocks.prefix_cache import PrefixCache
from scheduler_svc.core.fleet.dispatcher import Dispatcher
from scheduler_svc.core.fleet.inbox import Assignment, Inbox
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.batch import Batch
from scheduler_svc.core.step.beam_batch import BeamBatch
from scheduler_svc.core.step.beam_batch import Continuation as BeamContinuation
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.core.step.pooled_groups import PooledGroups
from scheduler_svc.core.step.preemption import PreemptedGroups, Preemption
from scheduler_svc.core.step.prefills import Prefill, Prefills
from scheduler_svc.core.step.slot_pool import SlotPool, SlotState
from scheduler_svc.core.step.slotted_things import GrammarSlots
from scheduler_svc.core.step.step_cost import StepCost, Sums
from scheduler_svc.core.step.step_pace import StepPace
from scheduler_svc.core.step.step_plan import StepInFlight
from scheduler_svc.core.step.swapping import HostPool, SwappedGroups, SwappedTable, _SwapInPlan
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.core.waiting.policy import FairShare, _Level, _Tenant
from scheduler_svc.core.waiting.waiting_lines import GroupsByArrival, Level
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue, _Place
from scheduler_svc.core.waiting.waiting_work import WaitingWork, Work
from scheduler_svc.request.continuation import ContinuedOutput
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import BeamSearchParams, StopConditions
from scheduler_svc.request.provenance import Provenance, Span
from scheduler_svc.step_log.masking import MASKED_ERROR, TokenMask
from scheduler_svc.step_log.state_codec import BlockNames, Form, Score, SnapshotError

Masks: TypeAlias = Mapping[type, Mapping[str, Callable[[Any], Any]]]


@dataclass(slots=True)
class Surroundings:
    """What of a snapshot is in no part of the fleet, as in `Snapshot`, and preemptions of planners that have left."""

    planner_numbers: tuple[int, ...]
    outside: dict[int, SequenceGroup]
    past_preemptions: Counter[PreemptionMode]


# What a fleet has of its own, and one of each for each planner. These are made by calls, and then get what they had.
_PARTS: Mapping[type, Mapping[str, Any]] = {
    Surroundings: typing.get_type_hints(Surroundings),
    WaitingQueue: {
        "_places": dict[int, _Place],
        "_levels": dict[int, Level],
        "_level_numbers": list[int],
        "_open_level_numbers": list[int],
        "_held": dict[int, SequenceGroup],
        "_num_waiting_of": Counter[str],
        "num_texts": int,
    },
    WaitingWork: {"total": Work, "_of": dict[tuple[int, str], Work]},
    FairShare: {
        "_tenants": dict[str, _Tenant],
        "_levels": dict[int, _Level],
        "_idle": OrderedDict[tuple[int, str], None],
    },
    Dispatcher: {
        "unplaceable": set[SequenceGroup],
        "_takers": list[Inbox] | None,
        "_dispatched_to": set[ExecutorPlanner],
        "num_grammar_waits": int,
    },
    Inbox: {
        "assignments": list[Assignment],
        "refused": set[SequenceGroup],
        "num_blocks": list[int],
        **dict.fromkeys(("num_slots", "num_tokens", "num_long"), int),
    },
    ExecutorPlanner: {
        "in_flight": deque[StepInFlight],
        **dict.fromkeys(("is_probing", "is_draining", "_was_processed", "takes_groups"), bool),
        **dict.fromkeys(("now_s", "_progress_at_s"), float),
        **dict.fromkeys(("_num_prefill_steps", "last_scheduled_step_id", "last_processed_step_id"), int),
    },
    StepCost: {
        "slack": float,
        "slowest_s": dict[tuple[int, int], float],
        "kinds": set[tuple[bool, bool, bool]],
        "token_sums": Sums,
        "row_sums": Sums,
        "row_tokens": float,
    },
    StepPace: {"_recent": deque[float], "_recent_large": deque[float], "_kinds": set[tuple[bool, bool]]},
    StopChecker: {
        "_max_num_tokens": Int32Array,
        "_ignores_eos": BoolArray,
        "_has_stop_token_ids": BoolArray,
        "_stop_token_ids": list[frozenset[int]],
        "_num_with_stop_token_ids": int,
    },
    Batch: {
        "running": list[SequenceGroup],
        "sequence_in_slot": list[Sequence | None],
        "num_registered_blocks": list[int],
        **dict.fromkeys(("num_computed_tokens", "_tenant_of_slot"), Int32Array),
        **dict.fromkeys(("is_decoding", "wants_logprobs", "is_vacated"), BoolArray),
        "shares_last_block": set[int],
        **dict.fromkeys(("free_slots", "vacated_slots", "_free_tenant_numbers"), list[int]),
        **dict.fromkeys(("num_vacated", "num_claimed_slots"), int),
        "solo": SequenceGroup | None,
        "_num_claimed_by": dict[SequenceGroup, int],
        "_num_groups_of_tenant": Counter[str],
        "_tenant_numbers": dict[str, int],
    },
    GroupBlocks: {"first_blocks": Int32Array},
    BlockAllocator: {"ref_counts": Int32Array, "_free_blocks": IndexArray, "_num_uncached_free_blocks": int},
    SwappedGroups: {"groups": list[SequenceGroup]},
    HostPool: {
        "tables": dict[Sequence, SwappedTable],
        "_swap_in_plans": dict[SequenceGroup, _SwapInPlan],
    },
    PreemptedGroups: {"groups": list[SequenceGroup], "_waiting_sequences": dict[tuple[int, int], Sequence]},
    BeamBatch: {
        "_candidates": dict[SequenceGroup, dict[Sequence, Candidates]],
        "_num_rows_in_flight": dict[SequenceGroup, int],
        "ready": dict[SequenceGroup, list[BeamContinuation]],
    },
    Prefills: {"running": list[Prefill]},
    PooledGroups: {"groups": list[SequenceGroup], "needs_step": bool},
    Preemption: {"num_preemptions": dict[PreemptionMode, int]},
}
# That one row of a step is answered with, and all that a step is answered with, at most.
MAX_CANDIDATES = 2**16
_MAX_ANSWERS = 2**24
# Planners of one fleet, at most.
MAX_CORES = 4096
# Lists of a part with one entry for each slot.
_OF_SLOTS = ("num_registered_blocks", "_stop_token_ids")


def _fill(names: tuple[str, ...], part: Any, items: list[Any]) -> None:
    """Give a part what it had. Arrays and deques stay where they are: others have views of them, or them."""
    for name, item in zip(names, items, strict=True):
        present = getattr(part, name)
        if isinstance(present, np.ndarray | deque) or name in _OF_SLOTS:
            sized = isinstance(present, deque)
            if (len(item) > (present.maxlen or len(item))) if sized else np.shape(item) != np.shape(present):
                raise SnapshotError(f"{name} of {type(part).__name__} has another size")
        if isinstance(present, np.ndarray):
            present[:] = item
        elif isinstance(present, deque):
            present.clear()
            present.extend(item)
        else:
            setattr(part, name, item)


# Classes whose values are not their attributes as they are ------------------------------------------------

_COLUMNS: Mapping[str, Any] = {
    **dict.fromkeys(("live", "active"), BoolArray),
    **dict.fromkeys(("generation", "num_prompt_tokens", "num_tokens", "num_scheduled_tokens"), Int32Array),
    **dict.fromkeys(("num_known_tokens", "num_open_tokens", "allowance"), Int32Array),
    **dict.fromkeys(("num_prompt_logprobs", "grammar_slot"), Int32Array),
    "cache_salt": npt.NDArray[np.uint64],
}
_ROWS = {
    "has_allowances": bool,
    "sampling": bytes,
    "token_ids": Int32Array,
    "block_counts": list[Int32Array],
    "block_ids": list[Int32Array],
    "rules": list[TokenRules | None],
    "grammars": list[Grammar | None],
}


def _get_table(table: BatchTable) -> list[Any]:
    """Return the columns, and what the live slots hold, one after the other: the rest is garbage."""
    slots = table.live.nonzero()[0].tolist()
    token_ids = [table.token_ids[slot, : table.num_tokens[slot]] for slot in slots]
    block_ids = [[group.block_ids[slot, : group.counts[slot]] for slot in slots] for group in table.groups]
    counts = [group.counts for group in table.groups]
    rules = [table.token_rules[slot] for slot in slots]
    columns = [*(getattr(table, name) for name in _COLUMNS), table.has_allowances]
    blocks = counts, list(map(_joined, block_ids))
    return [*columns, table.sampling.tobytes(), _joined(token_ids), *blocks, rules, table.grammars]


def _joined(rows: list[Int32Array]) -> Int32Array:
    return np.concatenate(rows) if rows else np.empty(0, np.int32)


def _put_table(table: BatchTable, items: list[Any]) -> None:
    *columns, table.has_allowances, sampling, token_ids, block_counts, block_ids, rules, grammars = items
    if not len(block_counts) == len(block_ids) == len(table.groups):
        raise SnapshotError(f"a batch table has {len(block_ids)} cache groups instead of {len(table.groups)}")
    if len(grammars) != len(table.grammars):
        raise SnapshotError(f"a batch table has {len(grammars)} grammar slots instead of {len(table.grammars)}")
    table.grammars = grammars
    _fill(tuple(_COLUMNS), table, columns)
    for group, counts in zip(table.groups, block_counts, strict=True):
        _fill(("counts",), group, [counts])
    table.sampling[:] = np.frombuffer(sampling, SAMPLING_ROW, table.max_num_seqs)
    slots = table.live.nonzero()[0]
    for counts in (table.num_prompt_logprobs, table.num_logprobs, table.num_candidates):
        if counts.max() > MAX_CANDIDATES:
            raise SnapshotError(f"a slot asks for more than {MAX_CANDIDATES} candidates")
    for counts, most in (
        (table.num_tokens, table.max_model_len),
        (table.num_scheduled_tokens, table.max_model_len),
        (table.num_known_tokens, table.max_model_len),
        (table.num_open_tokens, table.max_model_len),
        (table.allowance, MAX_ALLOWANCE),
        *((group.counts, group.block_ids.shape[1]) for group in table.groups),
    ):
        if counts.min() < 0 or counts.max() > most:
            raise SnapshotError(f"a slot has more than {most} tokens or blocks, or less than none")
    rows = [(table.token_ids, table.num_tokens, token_ids)]
    rows += [(group.block_ids, group.counts, ids) for group, ids in zip(table.groups, block_ids, strict=True)]
    for column, counts, values in rows:
        if values.shape != (counts[slots].sum(),) or len(rules) != len(slots):
            raise SnapshotError("the slots of a batch table and what they hold differ in size")
        ends = np.cumsum(counts[slots]).tolist()
        for slot, begin, end in zip(slots.tolist(), [0, *ends], ends, strict=False):
            column[slot, : end - begin] = values[begin:end]
    for group, ids in zip(table.groups, block_ids, strict=True):
        if ids.size and not 0 <= ids.min() <= ids.max() < group.num_device_blocks:
            raise SnapshotError("a batch table names a block that is not there")
    for slot, rule in zip(slots.tolist(), rules, strict=True):
        table.token_rules[slot] = rule


# Of the slots of one kind, with the contents of what they hold.
_SLOTS: Mapping[str, Any] = {
    "bodies": list[bytes | None],
    "states": list[SlotState],
    **dict.fromkeys(("num_followers", "unused"), list[int]),
    "num_loads": int,
    "errors": list[str],
}


def _get_slots(slots: SlotPool[Any]) -> list[Any]:
    bodies = [None if key is None else key.body for key in slots.keys]
    return [bodies, slots.states, slots.num_followers, list(slots._unused), slots.num_loads, slots.errors]


def _put_slots(make: Callable[[bytes], Any], slots: SlotPool[Any], items: list[Any]) -> None:
    """Give slots what they hold; `check_integrity` sees whether somebody uses it."""
    bodies, states, num_followers, unused, num_loads, errors = items
    keys = [None if body is None else make(body) for body in bodies]
    are_as_many = {*map(len, (keys, states, num_followers, errors))} == {slots.num_slots}
    if not are_as_many or not {*unused} <= {*range(slots.num_slots)}:
        raise SnapshotError(f"a planner has {len(keys)} slots of a kind instead of {slots.num_slots}")
    slots.keys, slots.states, slots.errors = keys, states, errors
    slots.num_loading = states.count(SlotState.LOADING)
    slots.num_followers, slots.num_loads = num_followers, num_loads
    slots._slot_of = {key.digest: slot for slot, key in enumerate(keys) if key is not None}
    slots._unused = OrderedDict.fromkeys(unused)


def _put_order(order: EvictionOrder, items: list[Any]) -> None:
    [block_ids] = items
    _check_blocks(block_ids, len(order._position_of))
    order.append(block_ids)


def _get_cache(cache: PrefixCache) -> list[Any]:
    """Return one name for each registered block, and the names that are on their way."""
    registered = cache.is_registered.nonzero()[0]
    names = [cache._hash_of_block[block_id] for block_id in registered.tolist()]
    unsent = cache._unsent or {}
    return [cache.bit.bit_length(), registered, names, list(unsent), list(unsent.values()), cache._written_by_slot]


def _put_cache(cache: PrefixCache, items: list[Any]) -> None:
    bit_length, registered, names, unsent, unsent_names, written = items
    _check_blocks(registered, len(cache.is_registered))
    if not 1 <= bit_length <= MAX_CORES:
        raise SnapshotError(f"bit {bit_length} stands for a core; there are at most {MAX_CORES}")
    cache.bit = 1 << (bit_length - 1)
    to_send, cache._unsent = cache._unsent, None
    cache.register(names, registered.tolist())
    cache._unsent = to_send
    if unsent and to_send is None:
        raise SnapshotError("names of blocks are to be sent to an executor that wants none")
    if to_send is not None:
        to_send.update(zip(unsent, unsent_names, strict=True))
    cache._written_by_slot = written
    cache._being_written = {name for of_slot in written.values() for name in of_slot}


def _check_blocks(block_ids: npt.NDArray[Any], num_blocks: int) -> None:
    if block_ids.ndim != 1 or (block_ids.size and not 0 <= block_ids.min() <= block_ids.max() < num_blocks):
        raise SnapshotError(f"a block is named of which there are {num_blocks}")
    if len(np.unique(block_ids)) != len(block_ids):
        raise SnapshotError("a block stands twice in the order or among the names of a pool")


# The attributes as `BeamSearch` gives them, its histories as lists.
_SEARCH: Mapping[str, Any] = {
    "params": BeamSearchParams,
    "_stop_token_ids": Int32Array,
    **dict.fromkeys(("_num_prompt_tokens", "_num_ranked", "num_candidates", "_num_output_tokens"), int),
    **dict.fromkeys(("_max_num_output_tokens", "_live"), int),
    "_ended": list[tuple[Score, FinishReason]],
    "parents": list[int],
    "tokens": list[tuple[int, Score]],
    "beams": list[tuple[Score, int]],
}


def _get_search(search: BeamSearch) -> list[Any]:
    state = search.__getstate__()
    return [state[name] for name in _SEARCH]


def _put_search(search: BeamSearch, items: list[Any]) -> None:
    search.__setstate__(dict(zip(_SEARCH, items, strict=True)))


def _put_groups(groups: GroupsByArrival, items: list[Any]) -> None:
    [groups._groups] = items
    groups._begin = 0


def _put_layout(form: Form, layout: StepLayout, items: list[Any]) -> None:
    """Take a layout that asks for no more numbers than fit into a message."""
    form.put(layout, items)
    asked = layout.num_candidates, layout.num_alternatives, layout.num_prompt_logprobs, layout.num_prompt_alternatives
    for counts in asked:
        if counts is not None and counts.size and (counts.min() < 0 or counts.sum(dtype=np.int64) > _MAX_ANSWERS):
            raise SnapshotError("a step asks for more numbers than an executor answers")
    if layout.num_prompt_alternatives is not None and layout.num_prompt_alternatives.max(initial=0) > MAX_ALTERNATIVES:
        raise SnapshotError(f"a step asks for more than {MAX_ALTERNATIVES} alternatives")


def _put_checked(form: Form, value: Any, items: list[Any]) -> None:
    form.put(value, items)
    value.__post_init__()


def _all_forms() -> dict[type, Form]:
    """Return the forms of the table, and those of the dataclasses that their types name."""
    forms = {
        kind: Form(kind, hints, Form.of(kind, hints).get, functools.partial(_fill, tuple(hints)))
        for kind, hints in _PARTS.items()
    }
    cache = {"bit": int, "registered": IndexArray, "names": list[bytes], "unsent": list[int]}
    cache |= {"unsent_names": list[bytes], "written": dict[int, list[bytes]]}
    for form in (
        Form(BatchTable, {**_COLUMNS, **_ROWS}, _get_table, _put_table),
        Form(GrammarSlots, _SLOTS, _get_slots, functools.partial(_put_slots, Grammar)),
        Form(EvictionOrder, {"block_ids": IndexArray}, lambda order: [order.block_ids], _put_order),
        Form(PrefixCache, cache, _get_cache, _put_cache),
        Form(BeamSearch, _SEARCH, _get_search, _put_search),
        Form(GroupsByArrival, {"groups": list[SequenceGroup]}, lambda groups: [list(groups)], _put_groups),
        Form.of(Provenance, {"spans": list[Span], "latest": Span | None}),
    ):
        forms[form.kind] = form
    pending = [hint for form in forms.values() for hint in form.hints.values()]
    while pending:
        hint = pending.pop()
        pending += typing.get_args(hint)
        if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
            pending += typing.get_type_hints(hint).values()
        elif isinstance(hint, type) and is_dataclass(hint) and hint not in forms:
            forms[hint] = Form.of(hint)
            pending += forms[hint].hints.values()
    forms[Step] = replace(forms[Step], hints={**forms[Step].hints, "block_names": BlockNames})
    for kind in (Step, BeamSearchParams):
        form = forms[kind]
        forms[kind] = replace(form, put=functools.partial(_put_checked, form))
    forms[StepLayout] = replace(forms[StepLayout], put=functools.partial(_put_layout, forms[StepLayout]))
    return forms


FORMS = _all_forms()


def masks_of(mask: TokenMask | None) -> Masks:
    """Return what becomes of all values that have token ids; None: they stay."""
    if mask is None:
        return {}
    ids = mask.ids
    return {
        SequenceGroup: {"prompt_token_ids": ids},
        Sequence: {"token_ids": ids},
        ContinuedOutput: {"token_ids": ids},
        StopConditions: {"stop_token_ids": mask.id_set},
        StopChecker: {"_stop_token_ids": lambda sets: list(map(mask.id_set, sets))},
        BatchTable: {"token_ids": ids},
        Grammar: {"body": mask.grammar_body},
        GrammarSlots: {
            "bodies": lambda bodies: [None if body is None else mask.grammar_body(body) for body in bodies],
            "errors": lambda errors: [MASKED_ERROR if error else "" for error in errors],
        },
        Candidates: {"token_ids": ids},
        BeamContinuation: {"token_id": mask.id},
        Admission: {"token_ids": ids},
        PoolingInput: {"token_ids": ids},
        TableDelta: {"appended_tokens": lambda pairs: np.column_stack((pairs[:, 0], ids(pairs[:, 1])))},
        BeamSearch: {
            "_stop_token_ids": lambda token_ids: np.sort(ids(token_ids)),
            "tokens": lambda tokens: [(mask.id(token_id), logprob) for token_id, logprob in tokens],
        },
        TokenRules: {
            **dict.fromkeys(("biased_token_ids", "stop_token_ids", "banned_token_ids", "banned_words"), ids),
            "allowed_mask": lambda content: None if content is None else mask.allowed_mask(content),
        },
    }

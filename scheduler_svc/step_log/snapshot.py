"""A fleet as bytes, with everything that its decisions depend on, and back.

The bytes are a pickle of the core's own objects, with what they share and in which order their lists are: nothing
less decides the same to the byte. It is read back by the same sources of the core only (`core_digest`), and by an
unpickler that knows the classes of the core and a handful of others, calls nothing else, and so runs no code of whoever
wrote the file.
"""

import collections
import copyreg
import functools
import hashlib
import importlib
import io
import pickle
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

import scheduler_svc.core
import scheduler_svc.request
import shared
from scheduler_svc.core.beams.beam_batch import BeamBatch, Continuation
from scheduler_svc.core.beams.beam_search import BeamSearch, Candidates
from scheduler_svc.core.dispatch.fleet import Fleet
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.request.continuation import ContinuedOutput
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.step_log.masking import TokenMask
from shared.batch_table import BatchTable
from shared.executor_info import ExecutorInfo
from shared.sampling_row import SAMPLING_ROW
from shared.step import Admission, Int32Array, TableDelta
from shared.token_rules import TokenRules

# What the core imports of other rooms and decides with.
_SHARED_SOURCES = (
    *("batch_table", "delta_check", "executor_info", "sampling_row", "step", "step_layout", "step_size"),
    *("table_columns", "token_rules"),
)
_REQUEST_SOURCES = ("continuation", "life", "outputs", "parameters", "provenance")
_OTHER_MODULES = {
    *(f"shared.{name}" for name in _SHARED_SOURCES),
    *(f"scheduler_svc.request.{name}" for name in _REQUEST_SOURCES),
}
_COLLECTIONS = {"Counter", "OrderedDict", "deque"}
_METHODS = {"expects_nobody"}

_Reduced: TypeAlias = tuple[Any, ...]
_Array: TypeAlias = npt.NDArray[Any]


class SnapshotError(Exception):
    """A snapshot cannot be read; the message says why."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A fleet at one moment.

    Attributes:
        fleet: Its `is_complete` is to be set by whoever restores it.
        core_numbers: Those of `fleet.cores`, in order.
        outside: Live groups that no core has and that do not wait, by arrival.
    """

    fleet: Fleet
    core_numbers: tuple[int, ...]
    outside: dict[int, SequenceGroup]


@functools.cache
def core_digest() -> str:
    """Return the SHA-256 of the sources of the core, in hexadecimal digits."""
    core, request, common = (
        Path(package.__path__[0]) for package in (scheduler_svc.core, scheduler_svc.request, shared)
    )
    paths = [
        *sorted(core.rglob("*.py")),
        *(request / f"{name}.py" for name in _REQUEST_SOURCES),
        *(common / f"{name}.py" for name in _SHARED_SOURCES),
    ]
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.parent.name}/{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


# Writing ---------------------------------------------------------------------------------------------


def dump(snapshot: Snapshot, mask: TokenMask | None = None) -> bytes:
    """Return a snapshot as bytes, with masked tokens if there is a mask; the fleet is not changed."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=5)
    table: dict[Any, Any] = {
        **copyreg.dispatch_table,
        np.ndarray: _reduce_array,
        types.MethodType: _reduce_method,
        type(snapshot.fleet): _reduce_fleet,
        **dict.fromkeys((np.int32, np.int64, np.float32, np.float64, np.bool_), _reduce_scalar),
    }
    if mask is not None:
        table |= _masking_reducers(mask)
    pickler.dispatch_table = table
    pickler.dump((snapshot.fleet, snapshot.core_numbers, snapshot.outside))
    return buffer.getvalue()


def _reduce_fleet(fleet: Fleet) -> _Reduced:
    """Reduce a fleet, of whichever class, to a plain one."""
    state = fleet.__getstate__()
    return restore_fleet, (), {name: state[name] for name in _FLEET_ATTRIBUTES}


_FLEET_ATTRIBUTES = ("queue", "dispatcher", "cores", "_past_preemptions", "_policy", "_prefix_key")


def _reduce_array(array: _Array) -> _Reduced:
    if array.dtype == np.object_:
        return restore_objects, (array.tolist(),)
    kind = "sampling_row" if array.dtype == SAMPLING_ROW else array.dtype.str
    return restore_array, (kind, array.shape, array.tobytes())


def _reduce_scalar(value: np.generic) -> _Reduced:
    return restore_scalar, (value.dtype.str, value.tobytes())


def _reduce_method(method: types.MethodType) -> _Reduced:
    return restore_method, (method.__self__, method.__func__.__name__)


def _masking_reducers(mask: TokenMask) -> dict[type, Callable[[Any], _Reduced]]:
    """Return the reducers of all classes that have token ids."""
    ids = mask.ids
    masked_fields: dict[type, dict[str, Callable[[Any], Any]]] = {
        SequenceGroup: {"prompt_token_ids": ids},
        Sequence: {"token_ids": ids},
        ContinuedOutput: {"token_ids": ids},
        StopConditions: {"stop_token_ids": mask.id_set},
        StopChecker: {"_eos_token_ids": mask.id_tuple, "_stop_token_ids": lambda sets: list(map(mask.id_set, sets))},
        CoreLimits: {"eos_token_ids": mask.id_tuple},
        ExecutorInfo: {"eos_token_ids": mask.id_tuple},
        BeamBatch: {"_eos_token_ids": mask.id_set},
        Candidates: {"token_ids": ids},
        Continuation: {"token_id": mask.id},
        Admission: {"token_ids": ids},
        TableDelta: {"appended_tokens": lambda pairs: np.column_stack((pairs[:, 0], ids(pairs[:, 1])))},
        BeamSearch: {
            "_stop_token_ids": lambda token_ids: np.sort(ids(token_ids)),
            "tokens": lambda tokens: [(mask.id(token_id), logprob) for token_id, logprob in tokens],
        },
    }
    reducers: dict[type, Callable[[Any], _Reduced]] = {
        kind: functools.partial(_reduce_masked, masks) for kind, masks in masked_fields.items()
    }

    def reduce_table(table: BatchTable) -> _Reduced:
        kind, sizes, state = table.__reduce__()
        columns, rows = cast("tuple[Any, dict[int, tuple[Int32Array, Int32Array, TokenRules | None]]]", state)
        masked = {slot: (ids(token_ids), *rest) for slot, (token_ids, *rest) in rows.items()}
        return kind, sizes, (columns, masked)

    def reduce_rules(rules: TokenRules) -> _Reduced:
        masked = mask.rules(rules)
        return TokenRules, tuple(getattr(masked, field.name) for field in fields(TokenRules))

    return reducers | {BatchTable: reduce_table, TokenRules: reduce_rules}


def _reduce_masked(masks: dict[str, Callable[[Any], Any]], value: Any) -> _Reduced:
    """Reduce an object to its class and its attributes, some of them masked."""
    if is_dataclass(value):
        state = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    else:
        state = value.__getstate__()
    state = {name: masks[name](item) if name in masks else item for name, item in state.items()}
    # A pair is what objects with slots have: attributes are set one by one, whatever the class makes of it.
    if is_dataclass(value) and type(value).__dict__["__dataclass_params__"].frozen:
        return copyreg.__newobj__, (type(value),), list(state.values())  # type: ignore[attr-defined]
    whole = (None, state) if is_dataclass(value) else state
    return copyreg.__newobj__, (type(value),), whole  # type: ignore[attr-defined]


# Reading ---------------------------------------------------------------------------------------------


def load(content: bytes) -> Snapshot:
    """Return the snapshot that was dumped, by the same sources of the core.

    Raises: SnapshotError: the bytes are none of ours.
    """
    try:
        fleet, core_numbers, outside = _Unpickler(io.BytesIO(content)).load()
        return Snapshot(fleet, core_numbers, outside)
    except SnapshotError:
        raise
    except Exception as error:  # whatever somebody wrote: nothing of it was run
        raise SnapshotError(f"the snapshot cannot be read: {type(error).__name__}: {error}") from error


def restore_fleet() -> Fleet:
    """Return a fleet that its state makes one."""
    return Fleet.__new__(Fleet)


def restore_array(kind: str, shape: tuple[int, ...], content: bytes) -> _Array:
    """Return an array that may be written to."""
    dtype = SAMPLING_ROW if kind == "sampling_row" else np.dtype(kind)
    return np.frombuffer(bytearray(content), dtype).reshape(shape)


def restore_objects(values: list[Any]) -> _Array:
    """Return an array of objects, [n]."""
    array = np.full(len(values), None, np.object_)
    array[:] = values
    return array


def restore_scalar(kind: str, content: bytes) -> Any:
    """Return a NumPy scalar."""
    return np.frombuffer(content, np.dtype(kind))[0]


def restore_method(owner: Any, name: str) -> Any:
    """Return a method of an object of the core; only those that the core passes on have names that count."""
    if name not in _METHODS or not type(owner).__module__.startswith("scheduler_svc.core."):
        raise SnapshotError(f"the snapshot wants to call {name!r}, which no snapshot does")
    return getattr(owner, name)


_RESTORERS: Mapping[str, Callable[..., Any]] = {
    restore.__name__: restore
    for restore in (restore_fleet, restore_array, restore_objects, restore_scalar, restore_method)
}


class _Unpickler(pickle.Unpickler):
    """Finds the classes of the core, and nothing that does anything."""

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _RESTORERS:
            return _RESTORERS[name]
        if module == "collections" and name in _COLLECTIONS:
            return getattr(collections, name)
        if (module, name) in (("copyreg", "__newobj__"), ("builtins", "set"), ("builtins", "frozenset")):
            return getattr(importlib.import_module(module), name)
        if module.startswith("scheduler_svc.core.") or module in _OTHER_MODULES:
            found = getattr(importlib.import_module(module), name, None) if module in _core_modules() else None
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise SnapshotError(f"the snapshot names {module}.{name}, which is no part of the core")


@functools.cache
def _core_modules() -> frozenset[str]:
    """Return the names of the modules whose classes a snapshot may hold."""
    root = Path(scheduler_svc.core.__path__[0])
    names = (path.relative_to(root).with_suffix("").parts for path in root.rglob("*.py"))
    return frozenset({"scheduler_svc.core." + ".".join(parts) for parts in names} | _OTHER_MODULES)

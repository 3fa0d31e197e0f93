"""Which engines of a cell are used: all that serve one model, with one tokenizer, under one name. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from scheduler_svc.request.served_model import Reproducibility, ServedModel


@dataclass(frozen=True, slots=True)
class Kind:
    """What all engines that are used have in common."""

    name: str
    model_hash: str
    weights_digest: str
    tokenizer_digest: str


_WORDS = {
    "name": "another name",
    "model_hash": "another model",
    "weights_digest": "other weights",
    "tokenizer_digest": "another tokenizer",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine process that takes requests."""

    kind: Kind
    scheduler_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Agreement:
    """Which engines are used.

    Attributes:
        kind: What they serve; None: no engine takes requests.
        used: Addresses of the engines that get new requests.
        odd: Why the other engines are not used, by address.
    """

    kind: Kind | None
    used: tuple[str, ...]
    odd: Mapping[str, str]


def agree(candidates: Mapping[str, Candidate], in_use: Kind | None) -> Agreement:
    """Return which engines are used, by their addresses.

    A kind stays in use while an engine of it takes requests: so a new model comes into use when the engines of the old
    model are drained. Else it is the kind of most engines; among equals, of the engine that has served longest.
    """
    odd: dict[str, str] = {}
    latest: dict[str, str] = {}  # address of the latest engine of each scheduler
    for address in sorted(candidates, key=lambda one: (candidates[one].incarnation, one), reverse=True):
        scheduler_id = candidates[address].scheduler_id
        if (later := latest.setdefault(scheduler_id, address)) != address:
            odd[address] = (
                f"its scheduler id {scheduler_id!r} is also that of the engine at {later}, which came later; give each "
                "scheduler a --scheduler-id of its own"
            )
    ready = {address: one for address, one in candidates.items() if address not in odd}
    kinds = Counter(one.kind for one in ready.values())
    kind = in_use if in_use in kinds else None
    if kind is None and kinds:
        first = {one.kind: one.incarnation for one in sorted(ready.values(), key=lambda one: -one.incarnation)}
        kind = max(kinds, key=lambda kind: (kinds[kind], -first[kind]))
    for address, one in ready.items():
        if kind is not None and one.kind != kind:
            differs = [
                _WORDS[field.name]
                for field in fields(Kind)
                if getattr(one.kind, field.name) != getattr(kind, field.name)
            ]
            odd[address] = (
                f"it serves {' and '.join(differs)} than the engines in use; drain those to change over to it"
            )
    return Agreement(kind, tuple(sorted(ready.keys() - odd.keys())), odd)


def merged(models: Sequence[ServedModel]) -> ServedModel:
    """Return what each of several engines of one kind serves."""
    first = models[0]
    if all(model is first for model in models):
        return first
    promises = [model.reproducibility for model in models]
    ids = tuple(sorted({one for promise in promises for one in promise.numerics_ids}))
    why_not = next((promise.why_not for promise in promises if promise.why_not), "")
    if not why_not and len(ids) > 1:
        why_not = f"the schedulers' executors have {len(ids)} different numerics ids"
    return replace(
        first,
        max_model_len=min(model.max_model_len for model in models),
        max_num_seqs=min(model.max_num_seqs for model in models),
        reproducibility=Reproducibility(ids, first.reproducibility.weights_digest, why_not),
    )

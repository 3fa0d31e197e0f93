"""Token ids under a secret permutation: a log whose decisions replay, and that tells nobody what was said.

Equal tokens stay equal, so stop tokens, rules, prefixes and their names work as before. Grammars, which say what was
asked for, become as many other bytes; equal ones stay equal. Two things do not survive:
a model cannot run the steps, and beams of equal score, which the search orders by token id, may come in another order.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import (
    Admission,
    EncoderInput,
    GrammarLoaded,
    Int32Array,
    PoolingInput,
    PoolingOutput,
    StepResult,
    TableDelta,
)
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.core.beam_search import BeamSearch, Candidates, _Node
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step.beam_batch import BeamBatch, Continuation
from scheduler_svc.core.step.slotted_things import GrammarSlots
from scheduler_svc.core.stopping import StopChecker
from scheduler_svc.request.continuation import ContinuedOutput
from scheduler_svc.request.parameters import StopConditions

# In place of why a grammar could not be loaded.
MASKED_ERROR = "masked"

_Value = TypeVar("_Value")
# What becomes of the attributes that tell of tokens, by class and name: called with the object, and the value.
Masks: TypeAlias = Mapping[type, Mapping[str, Callable[[Any, Any], Any]]]


class TokenMask:
    """One permutation of a vocabulary.

    Args:
        permutation: The other name of each token, [vocab_size] int32.
        grammar_key: Secret of the names of grammars.

    Attributes:
        of_attributes: What becomes of all attributes of records and snapshots that tell of tokens.
    """

    def __init__(self, permutation: Int32Array, grammar_key: bytes) -> None:
        self.permutation = permutation
        self._grammar_key = grammar_key
        # One more, so that -1, which stands for no token, stays what it is.
        self._names = np.append(permutation, np.int32(-1)).astype(np.int32)
        self.of_attributes = _masks_of(self)

    @classmethod
    def make(cls, vocab_size: int) -> "TokenMask":
        """Return a mask that nobody can guess."""
        generator = np.random.Generator(np.random.PCG64(secrets.randbits(256)))
        return cls(generator.permutation(vocab_size).astype(np.int32), secrets.token_bytes(32))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.permutation)

    def masked(self, value: _Value) -> _Value:
        """Return a value with masked tokens, and so all dataclasses and tuples that it is made of."""
        if isinstance(value, tuple):
            return tuple(map(self.masked, value)) if type(value) is tuple else value  # type: ignore[return-value]
        if not dataclasses.is_dataclass(value):
            return value
        masks = self.of_attributes.get(type(value), {})
        others: dict[str, Any] = {}
        for name in value.__dataclass_fields__:
            item = getattr(value, name)
            other = masks[name](value, item) if name in masks and item is not None else self.masked(item)
            if other is not item:
                others[name] = other
        return dataclasses.replace(value, **others) if others else value  # type: ignore[type-var]

    def ids(self, token_ids: Int32Array) -> Int32Array:
        """Return other names of tokens, of the same shape; ids outside of the vocabulary, which are faults, stay."""
        is_token = (token_ids >= -1) & (token_ids < self.vocab_size)
        if is_token.all():
            return self._names[token_ids]
        return np.where(is_token, self._names[np.where(is_token, token_ids, 0)], token_ids).astype(np.int32)

    def id(self, token_id: int) -> int:
        """Return the other name of a token."""
        return int(self.ids(np.array([token_id], np.int32))[0])

    def allowed_mask(self, content: bytes) -> bytes:
        """Return `TokenRules.allowed_mask` of masked tokens."""
        flags = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")
        masked: npt.NDArray[np.uint8] = np.zeros_like(flags)
        masked[self.permutation] = flags[: self.vocab_size]
        return np.packbits(masked, bitorder="little").tobytes()

    def grammar_body(self, body: bytes) -> bytes:
        """Return another body of the same length: equal for equal bodies, and nobody can tell what it stands for."""
        name = hashlib.blake2b(body, key=self._grammar_key).digest()
        return name[: len(body)].ljust(len(body), b"\0")


def _masks_of(mask: TokenMask) -> Masks:
    def ids(_: Any, token_ids: Any) -> Any:
        return mask.ids(token_ids)

    def one(_: Any, token_id: int) -> int:
        return mask.id(token_id)

    def each(_: Any, token_ids: Any) -> Any:  # of a set, or a tuple
        return type(token_ids)(map(mask.id, token_ids))

    names = "sampled_token_ids", "candidate_token_ids", "alternative_token_ids", "prompt_alternative_token_ids"
    return {
        # What executors are and say, requests, and steps.
        CoreLimits: {"eos_token_ids": each},
        ExecutorInfo: {"eos_token_ids": each},
        StepResult: dict.fromkeys(names, ids),
        PoolingOutput: {"values": lambda _, values: np.zeros_like(values)},
        GrammarLoaded: {"error": lambda _, error: MASKED_ERROR if error else ""},
        SequenceGroup: {"prompt_token_ids": ids, "encoder_token_ids": ids},
        EncoderInput: {"token_ids": ids},
        ContinuedOutput: {"token_ids": ids},
        StopConditions: {"stop_token_ids": each},
        TokenRules: {
            **dict.fromkeys(("biased_token_ids", "stop_token_ids", "banned_token_ids", "banned_words"), ids),
            "allowed_mask": lambda _, content: mask.allowed_mask(content),
        },
        Grammar: {
            "body": lambda _, body: mask.grammar_body(body),
            "digest": lambda grammar, _: mask.masked(grammar).digest,
        },
        Admission: {"token_ids": ids},
        PoolingInput: {"token_ids": ids},
        TableDelta: {"appended_tokens": lambda _, pairs: np.column_stack((pairs[:, 0], mask.ids(pairs[:, 1])))},
        # What a snapshot has beside them.
        Sequence: {"token_ids": ids},
        BatchTable: {"token_ids": ids},
        StopChecker: {
            "_stop_token_ids": lambda _, sets: [frozenset(map(mask.id, of_one)) for of_one in sets],
            "_eos_token_ids": each,
        },
        GrammarSlots: {
            "errors": lambda _, errors: [MASKED_ERROR if error else "" for error in errors],
            "_slot_of": lambda slots, _: {
                mask.masked(key).digest: slot for slot, key in enumerate(slots.keys) if key is not None
            },
        },
        BeamBatch: {"_eos_token_ids": each},
        Candidates: {"token_ids": ids},
        Continuation: {"token_id": one},
        BeamSearch: {"_stop_token_ids": lambda _, token_ids: np.sort(mask.ids(token_ids))},
        _Node: {"token_id": one},
    }

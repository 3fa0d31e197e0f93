"""Token ids under a secret permutation: a log whose decisions replay, and that tells nobody what was said.

Equal tokens stay equal, so stop tokens, rules, prefixes and their names work as before. Grammars, which say what was
asked for, become as many other bytes; equal ones stay equal. Two things do not survive:
a model cannot run the steps, and beams of equal score, which the search orders by token id, may come in another order.
"""

import copy
import hashlib
import secrets
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import Int32Array, Step, StepResult
from octavo_shared.step_wire.token_rules import TokenRules
from scheduler_svc.request.parameters import StopConditions

# In place of why a grammar could not be loaded.
MASKED_ERROR = "masked"


class TokenMask:
    """One permutation of a vocabulary.

    Args:
        permutation: The other name of each token, [vocab_size] int32.
        grammar_key: Secret of the names of grammars.
    """

    def __init__(self, permutation: Int32Array, grammar_key: bytes) -> None:
        self.permutation = permutation
        self._grammar_key = grammar_key
        # One more, so that -1, which stands for no token, stays what it is.
        self._names = np.append(permutation, np.int32(-1)).astype(np.int32)

    @classmethod
    def make(cls, vocab_size: int) -> "TokenMask":
        """Return a mask that nobody can guess."""
        generator = np.random.Generator(np.random.PCG64(secrets.randbits(256)))
        return cls(generator.permutation(vocab_size).astype(np.int32), secrets.token_bytes(32))

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.permutation)

    def ids(self, token_ids: Int32Array) -> Int32Array:
        """Return other names of tokens, of the same shape; ids outside of the vocabulary, which are faults, stay."""
        is_token = (token_ids >= -1) & (token_ids < self.vocab_size)
        if is_token.all():
            return self._names[token_ids]
        return np.where(is_token, self._names[np.where(is_token, token_ids, 0)], token_ids).astype(np.int32)

    def maybe_ids(self, token_ids: Int32Array | None) -> Int32Array | None:
        """Return other names of tokens, if there are any."""
        return None if token_ids is None else self.ids(token_ids)

    def id(self, token_id: int) -> int:
        """Return the other name of a token."""
        return int(self.ids(np.array([token_id], np.int32))[0])

    def id_set(self, token_ids: frozenset[int]) -> frozenset[int]:
        """Return the other names of a set of tokens."""
        return frozenset(map(self.id, token_ids))

    def id_tuple(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the other names of tokens, in their order."""
        return tuple(map(self.id, token_ids))

    def conditions(self, conditions: StopConditions) -> StopConditions:
        """Return stop conditions with masked tokens."""
        return replace(conditions, stop_token_ids=self.id_set(conditions.stop_token_ids))

    def rules(self, rules: TokenRules | None) -> TokenRules | None:
        """Return rules on masked tokens."""
        if rules is None:
            return None
        return TokenRules(
            self.ids(rules.biased_token_ids),
            rules.biases,
            self.ids(rules.stop_token_ids),
            self.ids(rules.banned_token_ids),
            self.ids(rules.banned_words),
            None if rules.allowed_mask is None else self.allowed_mask(rules.allowed_mask),
        )

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

    def grammar(self, grammar: Grammar) -> Grammar:
        """Return a grammar with another body."""
        return Grammar(self.grammar_body(grammar.body))

    def step(self, step: Step) -> Step:
        """Return a step with masked tokens."""
        delta = step.delta
        has_tokens = delta.admissions or len(delta.appended_tokens) or step.pooling_inputs
        if not (has_tokens or delta.grammar_loads):
            return step
        admissions = tuple(
            replace(admission, token_ids=self.ids(admission.token_ids), token_rules=self.rules(admission.token_rules))
            for admission in delta.admissions
        )
        appended = delta.appended_tokens.copy()
        appended[:, 1] = self.ids(appended[:, 1])
        masked = copy.copy(step)
        masked.pooling_inputs = tuple(replace(text, token_ids=self.ids(text.token_ids)) for text in step.pooling_inputs)
        loads = (replace(load, grammar=self.grammar(load.grammar)) for load in delta.grammar_loads)
        masked.delta = replace(delta, grammar_loads=tuple(loads), admissions=admissions, appended_tokens=appended)
        return masked

    def result(self, result: StepResult) -> StepResult:
        """Return a result with masked tokens; what tells what was said, values of texts and errors, is replaced."""
        return replace(
            result,
            sampled_token_ids=self.ids(result.sampled_token_ids),
            candidate_token_ids=self.maybe_ids(result.candidate_token_ids),
            alternative_token_ids=self.maybe_ids(result.alternative_token_ids),
            prompt_alternative_token_ids=self.maybe_ids(result.prompt_alternative_token_ids),
            pooling_outputs=tuple(
                replace(output, values=np.zeros_like(output.values)) for output in result.pooling_outputs
            ),
            grammars_loaded=tuple(
                replace(loaded, error=MASKED_ERROR if loaded.error else "") for loaded in result.grammars_loaded
            ),
        )

"""Upper bounds of the size of a step's message, field by field, so that gRPC refuses none.

Pure, and as fast as a few additions: every decision needs them. `tests/property/test_step_size.py` compares
the bounds with real messages, and fails for a field of the proto that is not counted here.
"""

from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import BLOCK_NAME_BYTES, Adapter, Admission, Step
from octavo_shared.step_wire.token_rules import NO_TOKEN, TokenRules

# A non-negative number of up to 32 bits as a varint; a field with one; the tag and length of a list, bytes or message.
_NUMBER = 5
_FIELD = 1 + _NUMBER
_HEADER = 1 + _NUMBER

# Tags take one byte up to field 15, and two from there.
_FLOATS, _NUMBERS = 7, 5
_SAMPLING = _HEADER + _FLOATS * 5 + 9 + _NUMBERS * _FIELD

FORK_BYTES = _HEADER + 3 * _FIELD + _SAMPLING

# Slot, generation, two counts of tokens, alternatives of the prompt, grammar slot, adapter slot, saved state; tokens,
# blocks; sampling; the salt.
_ADMISSION = _HEADER + 8 * _FIELD + 2 * _HEADER + _SAMPLING + 9

# `00-<32 hexadecimal digits>-<16>-01`, with room for a later version of W3C Trace Context.
MAX_TRACEPARENT_BYTES = 256

# Epoch, step id, digest, feature bits and version of the weights, the headers of all lists, and what is around a step
# on the stream.
_STEP = 2 * 11 + 11 + 12 + 13 + 26 * (_HEADER + 1)


# The load of a grammar without its body: slot and digest; and the drop of the former grammar.
GRAMMAR_LOAD_BYTES = 1 + _HEADER + _FIELD + 2 + 32 + _HEADER + _NUMBER
# The load of an adapter without its source: the same.
ADAPTER_LOAD_BYTES = GRAMMAR_LOAD_BYTES

# A text to be pooled: number and task, tokens, their types; and its answer: number and flag, values.
_POOLING_INPUT = _HEADER + 2 * _FIELD + 2 * _HEADER
_POOLING_OUTPUT = _HEADER + 2 * _FIELD + _HEADER

# A transfer without its blocks: id, address and instance of the receiver, secret; one that is cancelled.
_TRANSFER = 512
CANCEL_BYTES = 8

# A registered block and its name.
BYTES_OF_A_NAME = _NUMBER + BLOCK_NAME_BYTES


def rules_bytes(rules: TokenRules) -> int:
    """Return a bound of the size of token rules."""
    num_ids = len(rules.biased_token_ids) + len(rules.stop_token_ids) + len(rules.banned_token_ids)
    words = rules.banned_words
    return max_rules_bytes(
        num_ids=num_ids,
        num_biases=len(rules.biases),
        num_words=len(words),
        num_word_tokens=int((words != NO_TOKEN).sum()),
        num_mask_bytes=0 if rules.allowed_mask is None else len(rules.allowed_mask),
    )


def max_rules_bytes(*, num_ids: int, num_biases: int, num_words: int, num_word_tokens: int, num_mask_bytes: int) -> int:
    """Return a bound of the size of token rules with these counts."""
    return 8 * _HEADER + _NUMBER * (num_ids + num_words + num_word_tokens) + 4 * num_biases + num_mask_bytes


def admission_bytes(num_tokens: int, num_blocks: int, num_rules_bytes: int = 0) -> int:
    """Return a bound of the size of an admission."""
    return _ADMISSION + 4 * num_tokens + _NUMBER * num_blocks + num_rules_bytes + MAX_TRACEPARENT_BYTES


def encoder_input_bytes(num_tokens: int, num_blocks: int) -> int:
    """Return a bound of the size of the input of an encoder in an admission."""
    return 3 * _HEADER + _FIELD + 4 * num_tokens + _NUMBER * num_blocks


def grammar_bytes(grammar: Grammar) -> int:
    """Return a bound of the size of the load of a grammar."""
    return GRAMMAR_LOAD_BYTES + len(grammar.body)


def adapter_bytes(adapter: Adapter) -> int:
    """Return a bound of the size of the load of an adapter."""
    return ADAPTER_LOAD_BYTES + len(adapter.source.encode())


def pooling_bytes(num_tokens: int) -> int:
    """Return a bound of the size of a text to be pooled, which may be a pair."""
    return _POOLING_INPUT + 5 * num_tokens


def pooled_bytes(num_values: int) -> int:
    """Return a bound of the size of an answer of `num_values`."""
    return _POOLING_OUTPUT + 4 * num_values


def transfer_bytes(num_blocks: int) -> int:
    """Return an upper bound of the bytes in a step's message that begin a transfer of so many blocks."""
    return _TRANSFER + _NUMBER * num_blocks


def other_bytes(*, num_slots: int, num_block_appends: int, num_block_moves: int, num_allowances: int = 0) -> int:
    """Return a bound of the size of everything in a step but its admissions, their grammars, and texts.

    Args:
        num_slots: Slots of the batch table: each may be released, deactivated, activated, forked twice, have its state
            saved, and get a replaced block, a copied block, a token and a prefill chunk.
        num_block_appends: Blocks that block tables may get.
        num_block_moves: Blocks that may be swapped.
        num_allowances: Slots whose allowance may change.
    """
    numbers = 3 + 3 + 3 + 2 + 2 + 2
    num_pairs = num_block_appends + num_block_moves + num_allowances
    return _STEP + num_slots * (numbers * _NUMBER + 2 * FORK_BYTES) + 2 * _NUMBER * num_pairs


def step_bytes(step: Step) -> int:
    """Return a bound of the size of a step's message."""
    delta = step.delta
    lists = (
        delta.released_slots,
        delta.deactivated_slots,
        delta.activated_slots,
        delta.appended_blocks,
        delta.replaced_blocks,
        delta.prefill_chunks,
        delta.appended_tokens,
        delta.allowances,
        step.blocks_to_swap_out,
        step.blocks_to_swap_in,
        step.blocks_to_copy,
    )
    num_forks = len(delta.forks) + len(delta.beam_forks)
    admissions = sum(_bytes_of(admission) for admission in delta.admissions)
    names = BYTES_OF_A_NAME * len(step.registered_blocks)
    things = _NUMBER * (len(delta.grammar_drops) + len(delta.adapter_drops))
    things += sum(grammar_bytes(load.grammar) for load in delta.grammar_loads)
    things += sum(adapter_bytes(load.adapter) for load in delta.adapter_loads)
    texts = sum(pooling_bytes(len(text.token_ids)) for text in step.pooling_inputs)
    transfers = 0
    if step.blocks_to_send or step.blocks_to_receive or step.transfers_to_cancel:
        transfers = CANCEL_BYTES * len(step.transfers_to_cancel)
        transfers += sum(transfer_bytes(len(send.block_ids)) for send in step.blocks_to_send)
        transfers += sum(transfer_bytes(len(receive.block_ids)) for receive in step.blocks_to_receive)
    numbers = _NUMBER * (sum(numbers.size for numbers in lists) + step.states_to_save.size)
    return _STEP + numbers + FORK_BYTES * num_forks + admissions + things + names + texts + transfers


def _bytes_of(admission: Admission) -> int:
    rules = admission.token_rules
    num_rules_bytes = 0 if rules is None else rules_bytes(rules)
    if (given := admission.encoder_input) is not None:
        contents = [content for content in (given.token_ids, given.features) if content is not None]
        num_rules_bytes += encoder_input_bytes(sum(map(len, contents)), len(given.block_ids))
    return admission_bytes(len(admission.token_ids), len(admission.block_ids), num_rules_bytes)

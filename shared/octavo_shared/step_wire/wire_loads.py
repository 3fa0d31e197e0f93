"""Loads of grammars and adapters into slots between values and messages; `step_wire/wire.py` has their steps."""

from octavo.execution.v1 import step_pb2
from octavo.values.wording import shown
from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.step import (
    ADAPTER_DIGEST_BYTES,
    MAX_ERROR_CHARS,
    MAX_SOURCE_BYTES,
    Adapter,
    AdapterLoad,
    AdapterLoaded,
    GrammarLoad,
    GrammarLoaded,
)


def encode_grammar_load(load: GrammarLoad) -> step_pb2.GrammarLoad:
    """Turn the load of a grammar into its message."""
    return step_pb2.GrammarLoad(grammar_slot=load.slot, digest=load.grammar.digest, body=load.grammar.body)


def decode_grammar_load(message: step_pb2.GrammarLoad) -> GrammarLoad:
    """Turn a message into the load of a grammar. Raises InvalidStepError: it has another digest."""
    load = GrammarLoad(message.grammar_slot, Grammar(message.body))
    if message.digest != load.grammar.digest:
        raise InvalidStepError(
            f"the grammar for grammar slot {load.slot} has the SHA-256 {load.grammar.digest.hex()}, but its digest "
            f"says {message.digest.hex()[:64]}"
        )
    return load


def encode_grammar_loaded(loaded: GrammarLoaded) -> step_pb2.GrammarLoaded:
    """Turn the end of a load into its message."""
    return step_pb2.GrammarLoaded(grammar_slot=loaded.slot, error=loaded.error)


def decode_grammar_loaded(message: step_pb2.GrammarLoaded) -> GrammarLoaded:
    """Turn a message into the end of a load."""
    return GrammarLoaded(message.grammar_slot, shown(message.error, MAX_ERROR_CHARS))


def encode_adapter_load(load: AdapterLoad) -> step_pb2.AdapterLoad:
    """Turn the load of an adapter into its message."""
    return step_pb2.AdapterLoad(adapter_slot=load.slot, adapter_id=load.adapter.source, digest=load.adapter.digest)


def decode_adapter_load(message: step_pb2.AdapterLoad) -> AdapterLoad:
    """Turn a message into the load of an adapter. Raises InvalidStepError: it has no source, or no such digest."""
    what, num_bytes = f"the adapter for adapter slot {message.adapter_slot}", len(message.adapter_id.encode())
    if not 1 <= num_bytes <= MAX_SOURCE_BYTES:
        raise InvalidStepError(f"{what} has a source of {num_bytes} bytes; it has 1 to {MAX_SOURCE_BYTES}")
    if len(message.digest) not in (0, ADAPTER_DIGEST_BYTES):
        raise InvalidStepError(
            f"{what} has a digest of {len(message.digest)} bytes; it has none, or {ADAPTER_DIGEST_BYTES}"
        )
    return AdapterLoad(message.adapter_slot, Adapter(message.adapter_id, message.digest))


def encode_adapter_loaded(loaded: AdapterLoaded) -> step_pb2.AdapterLoaded:
    """Turn the end of a load into its message."""
    return step_pb2.AdapterLoaded(adapter_slot=loaded.slot, digest=loaded.digest, error=loaded.error)


def decode_adapter_loaded(message: step_pb2.AdapterLoaded) -> AdapterLoaded:
    """Turn a message into the end of a load. Raises InvalidStepError: it has neither a digest nor an error."""
    if len(message.digest) != (0 if message.error else ADAPTER_DIGEST_BYTES):
        raise InvalidStepError(
            f"the end of the load into adapter slot {message.adapter_slot} has a digest of {len(message.digest)} bytes"
        )
    return AdapterLoaded(message.adapter_slot, message.digest, shown(message.error, MAX_ERROR_CHARS))

"""Steps and their results between values and protobuf messages, for both tiers.

Small delta arrays travel as packed repeated int32 (readable in grpcurl), N-long arrays as bytes of
little-endian int32 and float32. Fields without content are unset: a steady decode step
is epoch, step id and the few blocks that it appends.
"""

from collections.abc import Sequence as Seq
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from octavo.execution.v1 import sampling_params_pb2, step_pb2
from octavo.values.sampling_params_table import ROW_PARAMS
from octavo.values.wording import counted
from octavo_shared.errors import InvalidStepError
from octavo_shared.step_wire.executor_info import Capability
from octavo_shared.step_wire.step import (
    BLOCK_NAME_BYTES,
    NO_LOGPROBS,
    NO_RESOURCES,
    Admission,
    EncoderInput,
    Float32Array,
    Fork,
    Int32Array,
    PoolingInput,
    PoolingOutput,
    PoolingTask,
    Resources,
    SamplingRow,
    Step,
    StepResult,
    TableDelta,
    no_pairs,
    no_slots,
    no_triples,
)
from octavo_shared.step_wire.wire_loads import (
    decode_adapter_load,
    decode_adapter_loaded,
    decode_grammar_load,
    decode_grammar_loaded,
    encode_adapter_load,
    encode_adapter_loaded,
    encode_grammar_load,
    encode_grammar_loaded,
)
from octavo_shared.step_wire.wire_rules import decode_rules, encode_rules
from octavo_shared.step_wire.wire_transfers import decode_receive, decode_send, encode_receive, encode_send

Number = TypeVar("Number", int, float)

MIN_WIRE_VERSION = 1
MAX_WIRE_VERSION = 2

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")

_POOLING_TASKS = frozenset(task.value for task in PoolingTask)
_NEUTRAL_VALUES = tuple((parameter.name, parameter.row_value) for parameter in ROW_PARAMS)


def encode_step(step: Step, feature_bits: int | None = None) -> step_pb2.ExecuteModelRequest:
    """Turn a step into its message; `feature_bits` is None for a peer of wire version 1."""
    delta = step.delta
    # Building a packed field from a list is faster than from an array.
    return step_pb2.ExecuteModelRequest(
        epoch=step.epoch,
        step_id=step.step_id,
        released_slots=delta.released_slots.tolist(),
        grammar_drops=delta.grammar_drops,
        grammar_loads=[encode_grammar_load(load) for load in delta.grammar_loads],
        adapter_drops=delta.adapter_drops,
        adapter_loads=[encode_adapter_load(load) for load in delta.adapter_loads] if delta.adapter_loads else (),
        admissions=[encode_admission(admission) for admission in delta.admissions],
        beam_forks=[encode_fork(fork) for fork in delta.beam_forks],
        forks=[encode_fork(fork) for fork in delta.forks],
        deactivated_slots=delta.deactivated_slots.tolist(),
        activated_slots=delta.activated_slots.tolist(),
        appended_blocks=delta.appended_blocks.ravel().tolist(),
        replaced_blocks=delta.replaced_blocks.ravel().tolist(),
        prefill_chunks=delta.prefill_chunks.ravel().tolist(),
        appended_tokens=delta.appended_tokens.ravel().tolist(),
        allowances=delta.allowances.ravel().tolist() if len(delta.allowances) else None,
        blocks_to_swap_out=step.blocks_to_swap_out.ravel().tolist(),
        blocks_to_swap_in=step.blocks_to_swap_in.ravel().tolist(),
        blocks_to_copy=step.blocks_to_copy.ravel().tolist(),
        states_to_save=step.states_to_save.ravel().tolist() if step.states_to_save.size else None,
        table_digest=step.table_digest,
        feature_bits=feature_bits,
        registered_blocks=encode_registered_blocks(step.registered_blocks, step.block_names)
        if step.block_names
        else None,
        pooling_inputs=[encode_pooling_input(text) for text in step.pooling_inputs],
        draft_counts=b"" if step.draft_counts is None else step.draft_counts.tobytes(),
        draft_token_ids=b"" if step.draft_token_ids is None else step.draft_token_ids.astype(INT32).tobytes(),
        blocks_to_send=[encode_send(send) for send in step.blocks_to_send] if step.blocks_to_send else (),
        blocks_to_receive=[encode_receive(begun) for begun in step.blocks_to_receive] if step.blocks_to_receive else (),
        transfers_to_cancel=step.transfers_to_cancel,
        keeps_live=step.keeps_live,
    )


def decode_step(message: step_pb2.ExecuteModelRequest) -> Step:
    """Turn a message into a step. Raises InvalidStepError: an array has the wrong length."""
    delta = TableDelta(
        released_slots=_slots(message.released_slots),
        grammar_drops=tuple(message.grammar_drops),
        grammar_loads=tuple(decode_grammar_load(load) for load in message.grammar_loads),
        adapter_drops=tuple(message.adapter_drops) if message.adapter_drops else (),
        adapter_loads=tuple(map(decode_adapter_load, message.adapter_loads)) if message.adapter_loads else (),
        admissions=tuple(decode_admission(admission) for admission in message.admissions),
        beam_forks=tuple(decode_fork(fork) for fork in message.beam_forks),
        appended_tokens=_rows(message, "appended_tokens", 2),
        replaced_blocks=_rows(message, "replaced_blocks", 3),
        appended_blocks=_rows(message, "appended_blocks", 2),
        deactivated_slots=_slots(message.deactivated_slots),
        activated_slots=_slots(message.activated_slots),
        allowances=_rows(message, "allowances", 2),
        prefill_chunks=_rows(message, "prefill_chunks", 2),
        forks=tuple(decode_fork(fork) for fork in message.forks),
    )
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        delta=delta,
        blocks_to_swap_out=_rows(message, "blocks_to_swap_out", 2),
        blocks_to_swap_in=_rows(message, "blocks_to_swap_in", 2),
        blocks_to_copy=_rows(message, "blocks_to_copy", 2),
        states_to_save=_rows(message, "states_to_save", 3),
        table_digest=message.table_digest if message.HasField("table_digest") else None,
        **_registered_blocks(message),
        pooling_inputs=tuple(decode_pooling_input(text) for text in message.pooling_inputs),
        **_drafts(message),
        blocks_to_send=tuple(decode_send(send) for send in message.blocks_to_send),
        blocks_to_receive=tuple(decode_receive(receive) for receive in message.blocks_to_receive),
        transfers_to_cancel=tuple(message.transfers_to_cancel),
        keeps_live=message.keeps_live,
    )


def _drafts(message: step_pb2.ExecuteModelRequest) -> dict[str, Any]:
    if not message.draft_counts:
        return {}
    counts = np.frombuffer(message.draft_counts, np.uint8)
    return {"draft_counts": counts, "draft_token_ids": _array(message.draft_token_ids, INT32, "draft_token_ids")}


def feature_bits_of(step: Step) -> int:
    """Return the bits of the capabilities whose fields a step has."""
    bits = 1 << Capability.NAMED_BLOCKS if step.block_names else 0
    delta = step.delta
    if delta.grammar_loads or delta.grammar_drops:
        bits |= 1 << Capability.GRAMMARS
    if delta.adapter_loads or delta.adapter_drops:
        bits |= 1 << Capability.ADAPTERS
    if step.states_to_save.size:
        bits |= 1 << Capability.STATES
    for admission in delta.admissions:
        if admission.resources.grammar_slot is not None:
            bits |= 1 << Capability.GRAMMARS
        if admission.resources.adapter_slot is not None:
            bits |= 1 << Capability.ADAPTERS
        if admission.state_block is not None:
            bits |= 1 << Capability.STATES
        if admission.encoder_input is not None:
            bits |= 1 << Capability.ENCODER
        if admission.sampling.no_repeat_ngram_size:
            bits |= 1 << Capability.NO_REPEAT_NGRAM
    if any(fork.sampling.no_repeat_ngram_size for fork in (*delta.beam_forks, *delta.forks)):
        bits |= 1 << Capability.NO_REPEAT_NGRAM
    if len(delta.allowances) or step.draft_counts is not None:
        bits |= 1 << Capability.VARIABLE_TOKENS
    if step.pooling_inputs:
        bits |= 1 << Capability.POOLING
    if step.blocks_to_send or step.blocks_to_receive or step.transfers_to_cancel:
        bits |= 1 << Capability.BLOCK_TRANSFER
    if step.keeps_live:
        bits |= 1 << Capability.WEIGHT_VERSIONS
    return bits


def encode_pooling_input(text: PoolingInput) -> step_pb2.PoolingInput:
    """Turn a text to be pooled into its message."""
    return step_pb2.PoolingInput(
        number=text.number,
        token_ids=text.token_ids.astype(INT32, copy=False).tobytes(),
        token_type_ids=text.token_type_ids,
        task=step_pb2.PoolingTask.ValueType(text.task),
    )


def decode_pooling_input(message: step_pb2.PoolingInput) -> PoolingInput:
    """Turn a message into a text to be pooled. Raises InvalidStepError: it is malformed."""
    if message.task not in _POOLING_TASKS:
        raise InvalidStepError(
            f"pooling input {message.number} has task {message.task}; it may be 1 (EMBED) or 2 (SCORE)"
        )
    token_ids = _array(message.token_ids, INT32, "token_ids")
    return PoolingInput(message.number, token_ids, message.token_type_ids, PoolingTask(message.task))


def encode_pooling_output(output: PoolingOutput) -> step_pb2.PoolingOutput:
    """Turn the answer to a text into its message."""
    return step_pb2.PoolingOutput(
        number=output.number, values=_bytes(output.values, FLOAT32), flag=step_pb2.RowFlag.ValueType(output.flag)
    )


def decode_pooling_output(message: step_pb2.PoolingOutput) -> PoolingOutput:
    """Turn a message into the answer to a text. Raises InvalidStepError: it is malformed."""
    return PoolingOutput(message.number, _array(message.values, FLOAT32, "values"), message.flag)


def encode_registered_blocks(block_ids: Int32Array, names: bytes) -> step_pb2.RegisteredBlocks:
    """Return the message of blocks and their names."""
    return step_pb2.RegisteredBlocks(block_ids=block_ids.tolist(), names=names)


def decode_registered_blocks(message: step_pb2.RegisteredBlocks) -> tuple[Int32Array, bytes]:
    """Return blocks, [n], and their names, one after the other. Raises InvalidStepError: they do not match."""
    block_ids = np.array(message.block_ids, np.int32)
    if len(message.names) != BLOCK_NAME_BYTES * len(block_ids):
        raise InvalidStepError(
            f"registered_blocks has {len(message.names)} bytes of names for {counted(len(block_ids), 'block')}; a name "
            f"has {BLOCK_NAME_BYTES}"
        )
    return block_ids, message.names


def _registered_blocks(message: step_pb2.ExecuteModelRequest) -> dict[str, Any]:
    if not message.HasField("registered_blocks"):  # the usual case
        return {}
    block_ids, names = decode_registered_blocks(message.registered_blocks)
    return {"registered_blocks": block_ids, "block_names": names}


def encode_result(result: StepResult) -> step_pb2.ExecuteModelResponse:
    """Turn a step's result into its message."""
    return step_pb2.ExecuteModelResponse(
        epoch=result.epoch,
        step_id=result.step_id,
        sampled_token_ids=result.sampled_token_ids.astype(INT32, copy=False).tobytes(),
        logprobs=_bytes(result.logprobs, FLOAT32),
        execute_duration_us=result.execute_duration_us,
        move_duration_us=result.move_duration_us,
        table_digest=result.table_digest,
        candidate_token_ids=_bytes(result.candidate_token_ids, INT32),
        candidate_logprobs=_bytes(result.candidate_logprobs, FLOAT32),
        alternative_token_ids=_bytes(result.alternative_token_ids, INT32),
        alternative_logprobs=_bytes(result.alternative_logprobs, FLOAT32),
        prompt_logprobs=_bytes(result.prompt_logprobs, FLOAT32),
        prompt_alternative_token_ids=_bytes(result.prompt_alternative_token_ids, INT32),
        prompt_alternative_logprobs=_bytes(result.prompt_alternative_logprobs, FLOAT32),
        row_flags=b"" if result.row_flags is None else result.row_flags.tobytes(),
        token_counts=b"" if result.token_counts is None else result.token_counts.tobytes(),
        draft_counts=b"" if result.draft_counts is None else result.draft_counts.tobytes(),
        pooling_outputs=[encode_pooling_output(output) for output in result.pooling_outputs],
        grammars_loaded=[encode_grammar_loaded(loaded) for loaded in result.grammars_loaded],
        adapters_loaded=list(map(encode_adapter_loaded, result.adapters_loaded)) if result.adapters_loaded else (),
        arrived_transfers=result.arrived_transfers,
        sent_transfers=result.sent_transfers,
        cancelled_transfers=result.cancelled_transfers,
    )


def decode_result(message: step_pb2.ExecuteModelResponse) -> StepResult:
    """Turn a message into a step's result. Raises InvalidStepError: an array has the wrong length."""
    sampled_token_ids = _array(message.sampled_token_ids, INT32, "sampled_token_ids")
    logprobs = _array(message.logprobs, FLOAT32, "logprobs") if message.logprobs else None
    if logprobs is not None and len(logprobs) != len(sampled_token_ids):
        raise InvalidStepError(f"{len(logprobs)} logprobs for {len(sampled_token_ids)} sampled tokens")
    candidates = _tokens_with_logprobs(message, "candidate")
    alternatives = _tokens_with_logprobs(message, "alternative")
    prompt_alternatives = _tokens_with_logprobs(message, "prompt_alternative")
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        sampled_token_ids=sampled_token_ids,
        logprobs=logprobs,
        execute_duration_us=message.execute_duration_us,
        move_duration_us=message.move_duration_us,
        table_digest=message.table_digest if message.HasField("table_digest") else None,
        candidate_token_ids=candidates[0],
        candidate_logprobs=candidates[1],
        alternative_token_ids=alternatives[0],
        alternative_logprobs=alternatives[1],
        prompt_logprobs=_array(message.prompt_logprobs, FLOAT32, "prompt_logprobs")
        if message.prompt_logprobs
        else None,
        prompt_alternative_token_ids=prompt_alternatives[0],
        prompt_alternative_logprobs=prompt_alternatives[1],
        row_flags=np.frombuffer(message.row_flags, np.uint8) if message.row_flags else None,
        token_counts=np.frombuffer(message.token_counts, np.uint8) if message.token_counts else None,
        draft_counts=np.frombuffer(message.draft_counts, np.uint8) if message.draft_counts else None,
        pooling_outputs=tuple(decode_pooling_output(output) for output in message.pooling_outputs),
        grammars_loaded=tuple(decode_grammar_loaded(loaded) for loaded in message.grammars_loaded),
        adapters_loaded=tuple(map(decode_adapter_loaded, message.adapters_loaded)) if message.adapters_loaded else (),
        arrived_transfers=tuple(message.arrived_transfers),
        sent_transfers=tuple(message.sent_transfers),
        cancelled_transfers=tuple(message.cancelled_transfers),
    )


def encode_admission(admission: Admission) -> step_pb2.Admission:
    """Turn an admission into its message."""
    return step_pb2.Admission(
        slot=admission.slot,
        generation=admission.generation,
        token_ids=admission.token_ids.astype(INT32, copy=False).tobytes(),
        num_prompt_tokens=admission.num_prompt_tokens,
        num_computed_tokens=admission.num_computed_tokens,
        block_ids=admission.block_ids.tolist(),
        sampling_params=encode_sampling(admission.sampling),
        cache_salt=admission.cache_salt,
        token_rules=None if admission.token_rules is None else encode_rules(admission.token_rules),
        num_prompt_logprobs=_unless(NO_LOGPROBS, admission.num_prompt_logprobs),
        traceparent=admission.traceparent,
        grammar_slot=admission.resources.grammar_slot,
        adapter_slot=admission.resources.adapter_slot,
        state_block=admission.state_block,
        encoder_input=None if admission.encoder_input is None else encode_encoder_input(admission.encoder_input),
    )


def decode_admission(message: step_pb2.Admission) -> Admission:
    """Turn a message into an admission."""
    return Admission(
        slot=message.slot,
        generation=message.generation,
        token_ids=_array(message.token_ids, INT32, "token_ids"),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=np.array(message.block_ids[:], np.int32),
        sampling=decode_sampling(message.sampling_params),
        cache_salt=message.cache_salt,
        token_rules=decode_rules(message.token_rules) if message.HasField("token_rules") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else NO_LOGPROBS,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
        resources=_resources(message),
        state_block=message.state_block if message.HasField("state_block") else None,
        encoder_input=decode_encoder_input(message.encoder_input) if message.HasField("encoder_input") else None,
    )


def encode_encoder_input(given: EncoderInput) -> step_pb2.EncoderInput:
    """Turn the input of an encoder into its message."""
    return step_pb2.EncoderInput(
        num_encoder_tokens=given.num_tokens,
        block_ids=given.block_ids.tolist(),
        **({} if given.token_ids is None else {"token_ids": _bytes(given.token_ids, INT32)}),
        **({} if given.features is None else {"features": _bytes(given.features, FLOAT32)}),
    )


def decode_encoder_input(message: step_pb2.EncoderInput) -> EncoderInput:
    """Turn a message into the input of an encoder. Raises InvalidStepError: it is malformed."""
    kind = message.WhichOneof("input")
    return EncoderInput(
        message.num_encoder_tokens,
        _slots(message.block_ids),
        _array(message.token_ids, INT32, "token_ids of the encoder") if kind == "token_ids" else None,
        _array(message.features, FLOAT32, "features") if kind == "features" else None,
    )


def _resources(message: step_pb2.Admission) -> Resources:
    has_grammar, has_adapter = message.HasField("grammar_slot"), message.HasField("adapter_slot")
    if not (has_grammar or has_adapter):
        return NO_RESOURCES
    return Resources(message.grammar_slot if has_grammar else None, message.adapter_slot if has_adapter else None)


def encode_fork(fork: Fork) -> step_pb2.Fork:
    """Turn a fork into its message."""
    return step_pb2.Fork(
        parent_slot=fork.parent_slot,
        slot=fork.slot,
        generation=fork.generation,
        sampling_params=encode_sampling(fork.sampling),
    )


def decode_fork(message: step_pb2.Fork) -> Fork:
    """Turn a message into a fork."""
    return Fork(message.parent_slot, message.slot, message.generation, decode_sampling(message.sampling_params))


def encode_sampling(row: SamplingRow) -> sampling_params_pb2.SamplingParams:
    """Turn a sampling row into its message; neutral values stay unset."""
    values = {name: value for name, neutral in _NEUTRAL_VALUES if (value := getattr(row, name)) != neutral}
    return sampling_params_pb2.SamplingParams(**values)


def decode_sampling(message: sampling_params_pb2.SamplingParams) -> SamplingRow:
    """Turn a message into a sampling row."""
    return SamplingRow(**{field.name: value for field, value in message.ListFields()})


def _slots(values: Seq[int]) -> Int32Array:
    """Return a field of slots as an array. A slice of a field is a list, which NumPy takes much faster."""
    return np.array(values[:], np.int32) if values else no_slots()


def _rows(message: step_pb2.ExecuteModelRequest, name: str, width: int) -> Int32Array:
    """Return the flat field `name` as [n, width]."""
    field = getattr(message, name)
    if not field:
        return no_pairs() if width == 2 else no_triples()
    values = np.array(field[:], np.int32)
    if len(values) % width:
        raise InvalidStepError(f"{name} has {len(values)} numbers, not a multiple of {width}")
    return values.reshape(-1, width)


def _tokens_with_logprobs(
    message: step_pb2.ExecuteModelResponse, kind: str
) -> tuple[Int32Array, Float32Array] | tuple[None, None]:
    """Return the token ids and log-probabilities of one `kind` in a result; None: there are none."""
    token_ids = _array(getattr(message, f"{kind}_token_ids"), INT32, f"{kind}_token_ids")
    logprobs = _array(getattr(message, f"{kind}_logprobs"), FLOAT32, f"{kind}_logprobs")
    if len(logprobs) != len(token_ids):
        raise InvalidStepError(f"{len(logprobs)} logprobs for {len(token_ids)} {kind}s")
    return (token_ids, logprobs) if len(token_ids) else (None, None)


def _unless(neutral: Number, value: Number) -> Number | None:
    """Return a value for its field; None: it is neutral."""
    return None if value == neutral else value


def _bytes(values: npt.NDArray[Any] | None, dtype: np.dtype[Any]) -> bytes:
    return b"" if values is None else values.astype(dtype, copy=False).tobytes()


def _array(content: bytes, dtype: np.dtype[Any], name: str) -> npt.NDArray[Any]:
    if len(content) % dtype.itemsize:
        raise InvalidStepError(f"{name} has {len(content)} bytes, not a multiple of {dtype.itemsize}")
    return np.frombuffer(content, dtype)

"""Every message means the same on both sides, costs little, and is refused when it is malformed."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from octavo.execution.v1 import execution_service_pb2, sampling_params_pb2, step_pb2
from octavo_shared.errors import InvalidStepError
from octavo_shared.grammar.grammar import Grammar
from octavo_shared.step_wire.executor_info import Capability, ExecutorInfo
from octavo_shared.step_wire.step import (
    NO_RESOURCES,
    Adapter,
    AdapterLoad,
    AdapterLoaded,
    Admission,
    BlockReceive,
    BlockSend,
    EncoderInput,
    Fork,
    GrammarLoad,
    GrammarLoaded,
    PoolingInput,
    PoolingOutput,
    PoolingTask,
    Resources,
    SamplingRow,
    Step,
    StepResult,
    TableDelta,
    pairs,
)
from octavo_shared.step_wire.token_rules import TokenRules, pad_words
from octavo_shared.step_wire.wire import (
    MAX_WIRE_VERSION,
    MIN_WIRE_VERSION,
    decode_admission,
    decode_fork,
    decode_result,
    decode_sampling,
    decode_step,
    encode_admission,
    encode_fork,
    encode_result,
    encode_sampling,
    encode_step,
    feature_bits_of,
)
from octavo_shared.step_wire.wire_info import decode_info, encode_info
from octavo_shared.step_wire.wire_rules import decode_rules, encode_rules
from tests.support.each_row import each_row
from tests.support.toy_executor import over_the_wire, result_over_the_wire

# Values that float32 holds exactly.
SAMPLING = SamplingRow(
    temperature=0.5,
    top_k=40,
    top_p=0.75,
    min_p=0.125,
    seed=2**64 - 1,
    output_index=2,
    num_logprobs=0,
    num_candidates=8,
    typical_p=0.5,
    repetition_penalty=1.25,
    presence_penalty=-0.5,
    frequency_penalty=1.5,
    min_tokens=7,
)


RULES = TokenRules(
    biased_token_ids=np.array([3, 1], np.int32),
    biases=np.array([0.5, -100.0], np.float32),
    stop_token_ids=np.array([2], np.int32),
    banned_token_ids=np.array([7, 8, 9], np.int32),
    banned_words=pad_words([[1, 2], [3, 4, 5]]),
    allowed_mask=b"\x01\xff",
)


TEXT = PoolingInput(2**32 - 1, np.array([5, 2**31 - 1], np.int32), b"\0\1", PoolingTask.EMBED)


def plain(value: Any) -> Any:
    """Return a value with its arrays as (dtype, shape, numbers), so that == compares everything."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, tuple):
        return tuple(plain(entry) for entry in value)
    if dataclasses.is_dataclass(value):
        return {entry.name: plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    return value


def full_step() -> Step:
    """Return a step in which every field has a value of its own."""
    admission = Admission(
        slot=3,
        generation=9,
        token_ids=np.array([5, 0, 2**31 - 1], np.int32),
        num_prompt_tokens=2,
        num_computed_tokens=1,
        block_ids=np.array([4, 0], np.int32),
        sampling=SAMPLING,
        cache_salt=2**64 - 1,
        token_rules=RULES,
        num_prompt_logprobs=3,
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        resources=Resources(grammar_slot=0, adapter_slot=0),
        state_block=0,
    )
    plainer = dataclasses.replace(
        admission,
        slot=4,
        sampling=SamplingRow(),
        cache_salt=0,
        token_rules=None,
        num_prompt_logprobs=-1,
        traceparent=None,
        resources=NO_RESOURCES,
        state_block=None,
    )
    delta = TableDelta(
        released_slots=np.array([0, 7], np.int32),
        grammar_drops=(3, 0),
        grammar_loads=(GrammarLoad(0, Grammar(b"{}")), GrammarLoad(5, Grammar(b""))),
        adapter_drops=(1, 0),
        adapter_loads=(AdapterLoad(0, Adapter("a")), AdapterLoad(1, Adapter("folder/é", bytes(range(32))))),
        admissions=(admission, plainer),
        beam_forks=(Fork(2, 13, 3, SAMPLING), Fork(13, 14, 1, SamplingRow(num_candidates=3))),
        appended_tokens=pairs((1, 11), (2, 12)),
        replaced_blocks=pairs((1, 2, 3), (4, 5, 6)),
        appended_blocks=pairs((5, 50)),
        deactivated_slots=np.array([8], np.int32),
        activated_slots=np.array([9, 10], np.int32),
        prefill_chunks=pairs((3, 2)),
        forks=(Fork(1, 11, 2, SAMPLING), Fork(1, 12, 1, SamplingRow())),
    )
    return Step(
        epoch=2**40,
        step_id=2**50,
        delta=delta,
        blocks_to_swap_in=pairs((1, 2)),
        blocks_to_copy=pairs((3, 4), (5, 6)),
        table_digest=2**64 - 1,
        registered_blocks=np.array([9], np.int32),
        block_names=bytes(range(16)),
        pooling_inputs=(TEXT, PoolingInput(0, np.array([5], np.int32), b"", PoolingTask.SCORE)),
        states_to_save=pairs((7, 32, 90), (0, 16, 91)),
        blocks_to_send=(BlockSend(2**64 - 1, "10.0.0.2:50061", "i", np.array([4, 0], np.int32), bytes(range(16))),),
        blocks_to_receive=(BlockReceive(5, np.array([2], np.int32), bytes(16)),),
        transfers_to_cancel=(2**63, 1),
    )


def test_a_step_with_everything_survives_the_wire() -> None:
    assert plain(over_the_wire(full_step())) == plain(full_step())


NO_REPEATS = SamplingRow(no_repeat_ngram_size=3)


@each_row(
    (TableDelta(), 0),
    (TableDelta(admissions=full_step().delta.admissions[1:]), 0),
    (TableDelta(admissions=(dataclasses.replace(full_step().delta.admissions[0], state_block=None),)), 1 << 4 | 1 << 5),
    (TableDelta(admissions=(dataclasses.replace(full_step().delta.admissions[1], state_block=0),)), 1 << 12),
    (TableDelta(forks=(Fork(0, 1, 1, NO_REPEATS),)), 1 << 14),
    (TableDelta(beam_forks=(Fork(0, 1, 1, NO_REPEATS),)), 1 << 14),
    (TableDelta(admissions=(dataclasses.replace(full_step().delta.admissions[1], sampling=NO_REPEATS),)), 1 << 14),
    (TableDelta(grammar_drops=(0,)), 1 << 4),
    (TableDelta(grammar_loads=(GrammarLoad(0, Grammar(b"")),)), 1 << 4),
    (TableDelta(adapter_drops=(0,)), 1 << 5),
    (TableDelta(adapter_loads=(AdapterLoad(0, Adapter("a")),)), 1 << 5),
)
def test_the_feature_bits_of_a_step_are_those_of_what_it_has(delta: TableDelta, bits: int) -> None:
    assert feature_bits_of(Step(1, 1, delta)) == bits
    named = Step(1, 1, delta, registered_blocks=np.zeros(1, np.int32), block_names=bytes(16))
    assert feature_bits_of(named) == bits | 4
    assert feature_bits_of(Step(1, 1, delta, pooling_inputs=(TEXT,))) == bits | 1 << 10
    assert feature_bits_of(Step(1, 1, delta, states_to_save=pairs((1, 2, 3)))) == bits | 1 << 12
    for field in ("blocks_to_send", "blocks_to_receive", "transfers_to_cancel"):
        step = dataclasses.replace(Step(1, 1, delta), **{field: getattr(full_step(), field)})
        assert feature_bits_of(step) == bits | 1 << 8


def test_a_grammar_with_another_digest_is_refused() -> None:
    message = encode_step(Step(1, 1, TableDelta(grammar_loads=(GrammarLoad(5, Grammar(b"{}")),))))
    message.grammar_loads[0].digest = bytes(32)

    with pytest.raises(InvalidStepError, match=r"^the grammar for grammar slot 5 has the SHA-256 44136fa"):
        decode_step(message)


@each_row(
    (Adapter(""), "the adapter for adapter slot 5 has a source of 0 bytes; it has 1 to 4096"),
    (Adapter("é" * 2049), "the adapter for adapter slot 5 has a source of 4098 bytes; it has 1 to 4096"),
    (Adapter("a", bytes(31)), "the adapter for adapter slot 5 has a digest of 31 bytes; it has none, or 32"),
)
def test_an_adapter_without_a_source_or_with_half_a_digest_is_refused(adapter: Adapter, words: str) -> None:
    message = encode_step(Step(1, 1, TableDelta(adapter_loads=(AdapterLoad(5, adapter),))))

    with pytest.raises(InvalidStepError) as refused:
        decode_step(message)
    assert str(refused.value) == words


@each_row(AdapterLoaded(1), AdapterLoaded(1, bytes(31)), AdapterLoaded(1, bytes(32), "no"))
def test_the_end_of_a_load_with_half_a_digest_or_with_both_is_refused(end: AdapterLoaded) -> None:
    with pytest.raises(InvalidStepError, match="the end of the load into adapter slot 1 has a digest of"):
        result_over_the_wire(StepResult(1, 2, np.empty(0, np.int32), adapters_loaded=(end,)))


def test_a_swap_out_survives_the_wire() -> None:
    step = Step(1, 2, TableDelta(), blocks_to_swap_out=pairs((7, 8)))

    assert plain(over_the_wire(step)) == plain(step)


def test_an_empty_step_survives_the_wire_in_four_bytes() -> None:
    step = Step(1, 2, TableDelta())

    assert plain(over_the_wire(step)) == plain(step)
    assert encode_step(step).ByteSize() == 4


@each_row(None, 0, 1)
def test_an_absent_digest_stays_absent_and_zero_stays_zero(digest: int | None) -> None:
    step = Step(1, 2, TableDelta(), table_digest=digest)
    result = StepResult(1, 2, np.empty(0, np.int32), table_digest=digest)

    assert over_the_wire(step).table_digest == digest
    assert result_over_the_wire(result).table_digest == digest


@each_row(None, np.array([-0.5, np.nan, -2.0], np.float32))
def test_a_result_survives_the_wire(logprobs: np.ndarray[tuple[int], np.dtype[np.float32]] | None) -> None:
    result = StepResult(2**40, 2**50, np.array([1, 0, 2**31 - 1], np.int32), logprobs, 1234, table_digest=7)

    received = result_over_the_wire(result)

    np.testing.assert_array_equal(received.sampled_token_ids, result.sampled_token_ids)
    assert (received.logprobs is None) == (logprobs is None)
    if logprobs is not None and received.logprobs is not None:
        np.testing.assert_array_equal(received.logprobs, logprobs)
    assert (received.epoch, received.step_id, received.execute_duration_us) == (2**40, 2**50, 1234)


def test_candidates_survive_the_wire() -> None:
    token_ids, logprobs = np.array([3, 2**31 - 1, 0], np.int32), np.array([-0.5, -1.25, -np.inf], np.float32)
    result = StepResult(1, 2, np.array([-1, 5], np.int32), candidate_token_ids=token_ids, candidate_logprobs=logprobs)

    received = result_over_the_wire(result)

    assert plain(received) == plain(result)


def test_alternatives_and_prompt_logprobs_survive_the_wire() -> None:
    token_ids, logprobs = np.array([3, 0], np.int32), np.array([-0.5, -1.25], np.float32)
    result = StepResult(
        1,
        2,
        np.array([5], np.int32),
        logprobs[:1],
        alternative_token_ids=token_ids,
        alternative_logprobs=logprobs,
        prompt_logprobs=logprobs[1:],
        prompt_alternative_token_ids=token_ids[::-1].copy(),
        prompt_alternative_logprobs=logprobs[::-1].copy(),
    )

    assert plain(result_over_the_wire(result)) == plain(result)


def test_vectors_and_scores_survive_the_wire() -> None:
    outputs = (PoolingOutput(7, np.array([0.5, -1.0], np.float32)), PoolingOutput(0, np.empty(0, np.float32), 4))
    result = StepResult(1, 2, np.empty(0, np.int32), pooling_outputs=outputs)

    assert plain(result_over_the_wire(result)) == plain(result)


def test_the_ends_of_transfers_survive_the_wire() -> None:
    ended = {"arrived_transfers": (1, 2**64 - 1), "sent_transfers": (3,), "cancelled_transfers": (0,)}
    result = StepResult(1, 2, np.empty(0, np.int32), **ended)  # type: ignore[arg-type]

    assert plain(result_over_the_wire(result)) == plain(result)


def test_the_end_of_a_load_survives_the_wire_and_a_peers_words_are_cut() -> None:
    result = StepResult(1, 2, np.empty(0, np.int32), grammars_loaded=(GrammarLoaded(3), GrammarLoaded(0, "it fails")))

    assert result_over_the_wire(result).grammars_loaded == result.grammars_loaded
    adapters = (AdapterLoaded(3, bytes(range(32))), AdapterLoaded(0, error="it fails"))
    assert result_over_the_wire(dataclasses.replace(result, adapters_loaded=adapters)).adapters_loaded == adapters
    long = dataclasses.replace(result, grammars_loaded=(GrammarLoaded(1, "\x1b" + "a" * 10_000),))
    [loaded] = result_over_the_wire(long).grammars_loaded
    assert loaded.error.isprintable()
    assert len(loaded.error) < 600


@each_row(
    (step_pb2.PoolingInput(number=3, token_ids=bytes(4)), "pooling input 3 has task 0; it may be 1 (EMBED) or 2"),
    (step_pb2.PoolingInput(token_ids=bytes(3), task=1), "token_ids has 3 bytes, not a multiple of 4"),  # type: ignore[arg-type]
)
def test_a_text_without_a_task_or_with_half_a_token_is_refused(message: step_pb2.PoolingInput, words: str) -> None:
    with pytest.raises(InvalidStepError) as refused:
        decode_step(step_pb2.ExecuteModelRequest(pooling_inputs=[message]))
    assert str(refused.value).startswith(words)


def test_rules_without_any_content_cost_nothing_but_a_mask_without_a_bit_is_kept() -> None:
    assert encode_rules(TokenRules()).ByteSize() == 0
    assert decode_rules(encode_rules(TokenRules())).is_neutral
    assert decode_rules(encode_rules(TokenRules(allowed_mask=b""))).allowed_mask == b""


@each_row(([2], [1]), ([2, 1], [1, 2, 3]), ([], [1]), ([3], [1, 2]))
def test_banned_words_that_do_not_add_up_are_refused(lengths: list[int], token_ids: list[int]) -> None:
    message = step_pb2.TokenRules(banned_word_lengths=lengths, banned_word_token_ids=token_ids)

    with pytest.raises(InvalidStepError, match=f"have {len(token_ids)} tokens"):
        decode_rules(message)


def test_a_result_without_candidates_has_none_and_costs_nothing() -> None:
    result = StepResult(1, 2, np.array([5], np.int32))

    received = result_over_the_wire(result)

    assert (received.candidate_token_ids, received.candidate_logprobs) == (None, None)
    assert encode_result(result).ByteSize() == 4 + 2 + 4


def test_arrays_of_any_width_are_sent_as_little_endian_32_bits() -> None:
    result = StepResult(1, 1, np.array([1, 258], np.int64), np.array([1.0, 2.0], np.float64))

    message = encode_result(result)

    assert message.sampled_token_ids == b"\x01\0\0\0\x02\x01\0\0"
    assert message.logprobs == b"\0\0\x80\x3f\0\0\0\x40"


@each_row(SAMPLING, SamplingRow(), SamplingRow(top_p=0.5), SamplingRow(num_logprobs=5))
def test_sampling_survives_the_wire(row: SamplingRow) -> None:
    message = sampling_params_pb2.SamplingParams.FromString(encode_sampling(row).SerializeToString())

    assert decode_sampling(message) == row


def test_neutral_sampling_costs_nothing_and_stays_unset() -> None:
    message = encode_sampling(SamplingRow())

    assert message.ByteSize() == 0
    assert not message.HasField("top_p")
    assert not message.HasField("num_logprobs")
    assert not message.HasField("typical_p")
    assert not message.HasField("repetition_penalty")


def test_zero_logprobs_are_not_none() -> None:
    assert encode_sampling(SamplingRow(num_logprobs=0)).HasField("num_logprobs")


def test_an_admission_and_a_fork_without_sampling_params_sample_neutrally() -> None:
    assert decode_admission(step_pb2.Admission(slot=1)).sampling == SamplingRow()
    assert decode_fork(step_pb2.Fork(slot=1)).sampling == SamplingRow()


def test_single_admissions_and_forks_survive_the_wire() -> None:
    admission, fork = full_step().delta.admissions[0], full_step().delta.forks[0]

    assert plain(decode_admission(encode_admission(admission))) == plain(admission)
    assert decode_fork(encode_fork(fork)) == fork


@pytest.mark.parametrize(
    "given",
    [
        EncoderInput(3, np.array([70, 71], np.int32), token_ids=np.array([5, 0, 7], np.int32)),
        EncoderInput(2, np.array([9], np.int32), features=np.array([0.5, -1.0, 2.0], np.float32)),
        EncoderInput(2, np.array([9], np.int32)),
    ],
)
def test_the_input_of_an_encoder_survives_the_wire_with_its_bit(given: EncoderInput) -> None:
    admission = dataclasses.replace(full_step().delta.admissions[0], encoder_input=given)

    again = decode_admission(step_pb2.Admission.FromString(encode_admission(admission).SerializeToString()))

    assert again.encoder_input is not None
    assert again.encoder_input.is_computed is given.is_computed
    for field in dataclasses.fields(EncoderInput):
        np.testing.assert_equal(getattr(again.encoder_input, field.name), getattr(given, field.name))
    assert feature_bits_of(Step(1, 1, TableDelta(admissions=(admission,)))) >> Capability.ENCODER & 1


def test_an_admission_that_is_not_traced_costs_nothing_for_it() -> None:
    traced = full_step().delta.admissions[0]
    untraced = dataclasses.replace(traced, traceparent=None)

    assert not encode_admission(untraced).HasField("traceparent")
    assert encode_admission(traced).ByteSize() - encode_admission(untraced).ByteSize() == 2 + 55


def test_executor_info_survives_the_wire_with_the_wire_versions() -> None:
    info = ExecutorInfo(
        "i", "m", "h", "float32", 16, 100, 3, 2048, 49152, 256, 4096, 2**22, (2, 0), 2, sliding_window_tokens=4096,
        sampling_defaults={"temperature": 0.0, "top_k": 20, "top_p": 0.75, "repetition_penalty": 1.0},
        numerics_id="1f", is_invariant=True, weights_digest="2e", why_not_invariant="of torch",
        kv_cache_dtype="int8", warning="of a cache",
        num_grammar_slots=256, matcher_id="of a version", max_grammar_bytes=2**18,
        num_adapter_slots=8, max_adapter_rank=64,
        pooling_tasks=frozenset({PoolingTask.EMBED}), embedding_size=384, num_token_types=2, is_generative=False,
        max_encoder_tokens=512,
    )  # fmt: skip

    message = execution_service_pb2.GetExecutorInfoResponse.FromString(encode_info(info).SerializeToString())

    assert decode_info(message) == info
    assert (message.min_wire_version, message.max_wire_version) == (MIN_WIRE_VERSION, MAX_WIRE_VERSION)


def test_an_executor_that_says_nothing_of_sampling_and_numerics_has_no_defaults_and_is_of_no_known_kind() -> None:
    info = decode_info(execution_service_pb2.GetExecutorInfoResponse(instance_id="of release 0.1.0"))

    assert info.sampling_defaults == {}
    assert (info.numerics_id, info.is_invariant, info.weights_digest) == ("", False, "")


@each_row(-1.0, float("nan"), 101.0)
def test_a_default_that_no_request_could_have_is_left_out(value: float) -> None:
    message = execution_service_pb2.GetExecutorInfoResponse()
    message.sampling_defaults.temperature = value
    message.sampling_defaults.min_p = 0.5

    assert decode_info(message).sampling_defaults == {"min_p": 0.5}


def test_a_steady_decode_step_of_1024_sequences_is_below_600_bytes() -> None:
    # With 16 tokens a block, 1 of 16 sequences needs a block in a step.
    slots = np.arange(0, 1024, 16)
    blocks = 60_000 + slots
    delta = TableDelta(appended_blocks=np.stack((slots, blocks), axis=1).astype(np.int32))

    size = len(encode_step(Step(3, 1_000_000, delta, table_digest=2**63)).SerializeToString())

    assert size < 600


def test_a_result_costs_four_bytes_a_sequence() -> None:
    result = StepResult(3, 1_000_000, np.full(1024, 49_151, np.int32), execute_duration_us=20_000)

    assert len(encode_result(result).SerializeToString()) < 4 * 1024 + 20


@each_row(
    ("appended_blocks", 2),
    ("appended_tokens", 2),
    ("prefill_chunks", 2),
    ("replaced_blocks", 3),
    ("blocks_to_swap_out", 2),
    ("blocks_to_swap_in", 2),
    ("blocks_to_copy", 2),
    ("states_to_save", 3),
)
def test_a_flat_array_of_wrong_length_is_refused_by_name(field: str, width: int) -> None:
    message = step_pb2.ExecuteModelRequest(epoch=1, step_id=1)
    getattr(message, field).extend(range(width + 1))

    with pytest.raises(InvalidStepError, match=f"^{field} has {width + 1} numbers, not a multiple of {width}"):
        decode_step(message)


def test_token_ids_of_an_odd_number_of_bytes_are_refused() -> None:
    message = step_pb2.ExecuteModelRequest(admissions=[step_pb2.Admission(token_ids=b"\0" * 7)])

    with pytest.raises(InvalidStepError, match="token_ids has 7 bytes, not a multiple of 4"):
        decode_step(message)


@each_row("sampled_token_ids", "logprobs", "candidate_token_ids", "candidate_logprobs")
def test_result_arrays_of_an_odd_number_of_bytes_are_refused(field: str) -> None:
    message = step_pb2.ExecuteModelResponse()
    setattr(message, field, b"\0" * 5)

    with pytest.raises(InvalidStepError, match=f"{field} has 5 bytes, not a multiple of 4"):
        decode_result(message)


def test_fewer_logprobs_than_tokens_are_refused() -> None:
    message = step_pb2.ExecuteModelResponse(sampled_token_ids=b"\0" * 8, logprobs=b"\0" * 4)

    with pytest.raises(InvalidStepError, match="1 logprobs for 2 sampled tokens"):
        decode_result(message)


@each_row((2, 1), (1, 2), (0, 1), (1, 0))
def test_candidates_without_their_logprobs_are_refused(num_token_ids: int, num_logprobs: int) -> None:
    message = step_pb2.ExecuteModelResponse(
        candidate_token_ids=b"\0" * 4 * num_token_ids, candidate_logprobs=b"\0" * 4 * num_logprobs
    )

    with pytest.raises(InvalidStepError, match=f"{num_logprobs} logprobs for {num_token_ids} candidates"):
        decode_result(message)


def test_a_step_that_breaks_the_order_is_refused_when_it_is_read() -> None:
    message = step_pb2.ExecuteModelRequest(step_id=4, blocks_to_copy=[1, 2, 2, 3])

    with pytest.raises(InvalidStepError, match="step 4 copies"):
        decode_step(message)

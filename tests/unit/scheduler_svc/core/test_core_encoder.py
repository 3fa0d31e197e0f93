"""Groups that attend to the output of an encoder: what is encoded, who shares it, and who waits for room."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from octavo_shared.step_wire.step import Step
from scheduler_svc.core.blocks.encoder_blocks import EncoderBlocks
from scheduler_svc.core.blocks.prefix_cache import BlockHasher
from scheduler_svc.core.limits import PreemptionMode, PrefillMode
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.request.parameters import BeamSearchParams
from tests.support.driving import Bench, check_pools_are_free, group, max_tokens, small_limits
from tests.support.each_row import each_row

PROMPT = [7, 8, 9, 10, 11]
INPUT, OTHER = list(range(10)), list(range(1, 11))  # 3 blocks each, the last one partial


def bench_of(
    blocks: int = 20,
    encoder_blocks: int = 8,
    budget: int = 16,
    *,
    host_blocks: int = 0,
    mode: PreemptionMode | None = None,
    prefix_caching: bool = True,
    vocab_size: int = 100_000,
    prefill_mode: PrefillMode = PrefillMode.CHUNKED,
    long_prefill_threshold: int = 0,
) -> Bench:
    limits = small_limits(
        max_num_seqs=8,
        budget=budget,
        blocks=blocks,
        host_blocks=host_blocks,
        preemption_mode=mode,
        prefix_caching=prefix_caching,
        vocab_size=vocab_size,
        max_encoder_tokens=12,
        encoder_blocks=encoder_blocks,
        prefill_mode=prefill_mode,
        long_prefill_threshold=long_prefill_threshold,
    )
    return Bench(limits)


def encoded(steps: list[Step]) -> list[list[int]]:
    """Return what the encoder computes in some steps."""
    inputs = [given.token_ids for step in steps for given in step.encoder_inputs]
    return [token_ids.tolist() for token_ids in inputs if token_ids is not None]


def alone(encoder: list[int], num_tokens: int, prompt: Seq[int] = (7,)) -> list[int]:
    bench = bench_of()
    bench.add(0, [*prompt], max_tokens(num_tokens), encoder=encoder)
    bench.run()
    return bench.outputs["a"]


@each_row(1, 2)
def test_an_input_is_encoded_once_and_found_by_equal_inputs_with_an_equal_salt(num_in_flight: int) -> None:
    bench = bench_of()
    given = (INPUT, 0), (OTHER, 0), (INPUT, 0), (INPUT, 5), (INPUT[:-1], 0)
    for arrival, (encoder, salt) in enumerate(given):
        added = bench.add(arrival, PROMPT, max_tokens(3), encoder=encoder, cache_salt=salt)
        expected = [] if arrival == 2 else [encoder]
        assert encoded(bench.run(num_in_flight)) == expected
        assert added.num_cached_tokens == (4 if arrival == 2 else 0)
    assert bench.outputs["a"] == bench.outputs["c"] == alone(INPUT, 3, PROMPT) != bench.outputs["b"]
    check_pools_are_free(bench.planner)


def test_who_comes_while_an_input_is_encoded_names_the_same_blocks_and_computes_its_own_prefix() -> None:
    bench = bench_of(budget=12)
    bench.add(0, [7], max_tokens(4), encoder=INPUT)
    first = bench.schedule()
    bench.add(1, [7, 8, 9, 10, 11], max_tokens(4), encoder=INPUT)
    second = bench.schedule()
    assert (len(encoded([first])), len(encoded([second]))) == (1, 0)
    tables = bench.planner.table.encoder
    assert tables is not None
    assert tables.of_slot(0).tolist() == tables.of_slot(1).tolist()
    bench.run(2)
    check_pools_are_free(bench.planner)


def test_a_group_that_moves_to_blocks_of_another_size_names_its_input_as_those_there() -> None:
    moved, limits = group(0, [7], encoder=INPUT[:3]), bench_of().planner.limits
    for size in (4, 8):
        blocks, hasher = EncoderBlocks(replace(limits, block_size=size), 0, 0), BlockHasher(b"", size)
        assert blocks.plan(moved, hasher, 0).names == blocks.plan(group(1, [7], encoder=INPUT[:3]), hasher, 0).names


def test_a_step_without_an_answer_leaves_no_name_and_an_aborted_one_leaves_its_input() -> None:
    bench = bench_of()
    added = bench.add(0, [7], encoder=INPUT)
    bench.schedule()
    encoder = bench.planner.blocks.encoder
    assert encoder is not None
    assert encoder.prefix_cache is not None
    assert not len(encoder.prefix_cache)
    bench.planner.abort(added)
    assert encoder.allocator.num_used_blocks == 3  # nobody else may write there
    bench.process()
    assert (encoder.allocator.num_used_blocks, len(encoder.prefix_cache)) == (0, 3)


def test_forks_and_beams_share_an_input_and_end_one_by_one() -> None:
    bench = bench_of(vocab_size=50)
    bench.add(0, [7], max_tokens(5), num_sequences=3, encoder=INPUT)
    bench.add(1, [7], max_tokens(5), beam_search=BeamSearchParams(beam_width=3), encoder=OTHER)
    assert encoded(bench.run(2)) == [INPUT, OTHER]
    check_pools_are_free(bench.planner)


@each_row(
    (PreemptionMode.RECOMPUTE, 0, True),
    (PreemptionMode.SWAP, 20, True),
    (PreemptionMode.SWAP, 20, False),
    (None, 3, False),
)
def test_preempted_groups_get_the_same_tokens(mode: PreemptionMode | None, host_blocks: int, finds: bool) -> None:
    bench = bench_of(blocks=8, encoder_blocks=6, host_blocks=host_blocks, mode=mode, prefix_caching=finds)
    for arrival in range(6):
        num_sequences = 2 if arrival == 1 else 1
        encoder = (INPUT, OTHER, [arrival] * 11)[arrival % 3]
        bench.add(arrival, [7], max_tokens(14), num_sequences=num_sequences, encoder=encoder)
    bench.run(2)
    assert sum(bench.planner.preemption.num_preemptions.values())
    assert bench.outputs["a"] == bench.outputs["d"] == alone(INPUT, 14)
    assert bench.outputs["b0"] == bench.outputs["e"] == alone(OTHER, 14)
    assert bench.outputs["f"] == alone([5] * 11, 14)
    check_pools_are_free(bench.planner)


def test_who_finds_no_room_for_an_input_waits_and_nobody_waits_for_ever() -> None:
    bench = bench_of(encoder_blocks=3)
    bench.add(0, [7], max_tokens(6), encoder=INPUT)
    bench.step()
    waiting = bench.add(1, [7], max_tokens(2), encoder=OTHER)
    assert bench.planner.obstacle(waiting, 0.0) == Obstacle(Wait.IN_LINE, "needs 3 blocks of the encoder, 0 free")
    bench.run()
    assert bench.outputs["b"] == alone(OTHER, 2)


def test_an_input_longer_than_the_rest_of_the_budget_gets_a_step_and_streams_wait_for_one_only() -> None:
    bench = bench_of(budget=12, encoder_blocks=12)
    bench.add(0, [7], max_tokens(12), encoder=INPUT)
    bench.step()
    bench.step()
    bench.add(1, [7], max_tokens(2), encoder=[3] * 12)
    steps = [bench.schedule() for _ in range(3)]
    assert [(len(encoded([step])), len(step.delta.admissions)) for step in steps] == [(0, 0), (1, 1), (0, 0)]
    bench.run()
    assert bench.outputs["a"] == alone(INPUT, 12)


def test_a_swapped_group_whose_input_takes_the_whole_budget_does_not_wait_for_the_end_of_all_streams() -> None:
    bench = bench_of(8, 9, 12, host_blocks=20, mode=PreemptionMode.SWAP, prefix_caching=False)
    for arrival, num_tokens in enumerate((14, 22, 22)):
        bench.add(arrival, [7], max_tokens(num_tokens), encoder=[arrival] * 12)
    while not len(bench.planner.swapped):
        bench.step()
    while len(bench.planner.swapped):
        bench.step()
    assert bench.planner.batch.num_rows == 2
    bench.run()
    assert bench.outputs["c"] == alone([2] * 12, 22)
    check_pools_are_free(bench.planner)


@each_row(*PrefillMode)
def test_who_begins_in_a_step_for_inputs_gets_one_chunk_of_a_long_prompt(mode: PrefillMode) -> None:
    bench = bench_of(prefill_mode=mode, long_prefill_threshold=6)
    bench.add(0, [7] * 11, max_tokens(2), encoder=INPUT)
    bench.step()
    too_long = bench.add(1, [7], encoder=[3] * 12)
    bench.step()
    assert bench.planner.admissions.unit_needs_step
    bench.planner.abort(too_long)
    bench.add(2, PROMPT * 3, max_tokens(2), encoder=[4])
    assert bench.schedule().delta.prefill_chunks.tolist() == [[1, 6]]
    bench.run()


@each_row(
    (12, None, "the model has an encoder, so the request needs an input for it"),
    (0, INPUT, "the model has no encoder; give what encoder_prompt says in the prompt"),
    (12, [1] * 13, "the encoder's input has 13 tokens; a step encodes it whole, and takes 1 to 12"),
    (12, [], "the encoder's input has 0 tokens; a step encodes it whole, and takes 1 to 12"),
)
def test_what_no_step_can_encode_is_refused(longest: int, encoder: list[int] | None, words: str) -> None:
    bench = Bench(small_limits(max_encoder_tokens=longest, encoder_blocks=8))
    assert bench.planner.admissions.why_never(group(0, [7], encoder=encoder)).startswith(words)

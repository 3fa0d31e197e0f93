"""Why a group is not admitted now, in words, and what placing it would cost."""

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle, Wait
from tests.support.driving import Bench, group, small_limits
from tests.support.each_row import each_row


def obstacle(bench: Bench, candidate: SequenceGroup, now_s: float = 0.0) -> Obstacle:
    found = bench.planner.obstacle(candidate, now_s)
    assert found is not None
    return found


def test_nothing_is_in_the_way_of_what_fits() -> None:
    assert Bench(small_limits()).planner.obstacle(group(0, 4), now_s=0.0) is None


def test_lacking_blocks_are_counted() -> None:
    bench = Bench(small_limits(blocks=6))
    bench.add(0, 14)
    bench.step()

    assert obstacle(bench, group(1, 12)) == Obstacle(Wait.IN_LINE, "needs 3 blocks, 2 free")


def test_lacking_slots_are_counted() -> None:
    bench = Bench(small_limits(max_num_seqs=3))
    bench.add(0, 2, num_sequences=2)
    bench.step()

    found = obstacle(bench, group(1, 2, num_sequences=2))

    assert found == Obstacle(Wait.IN_LINE, "needs 2 slots of the batch, 1 free")


def test_a_long_prompt_is_skipped_while_another_one_runs() -> None:
    bench = Bench(small_limits(long_prefill_threshold=4, budget=8))
    bench.add(0, 12)
    bench.step()

    assert obstacle(bench, group(1, 5)).wait is Wait.SKIPPED
    assert bench.planner.obstacle(group(1, 4), now_s=0.0) is None


def test_a_group_whose_prefix_is_on_its_way_is_skipped() -> None:
    bench = Bench(small_limits(prefix_caching=True))
    bench.add(0, [1, 2, 3, 4, 5])
    bench.schedule()

    found = obstacle(bench, group(1, [1, 2, 3, 4, 6]))

    assert found == Obstacle(Wait.SKIPPED, "the next block of its prefix is being computed or sent")


def test_preempted_groups_are_in_the_way_of_newcomers() -> None:
    bench = Bench(small_limits(blocks=6, budget=24, host_blocks=8, preemption_mode=PreemptionMode.SWAP))
    bench.add(0, 12)
    bench.add(1, 12)
    bench.step()
    bench.step()

    assert obstacle(bench, group(2, 1)) == Obstacle(Wait.IN_LINE, "preempted requests resume first: 1")


@each_row(
    (group(0, 12), "12 tokens plus one output token exceed max_model_len, 12"),
    (group(0, 2, num_sequences=5), "the request needs 5 slots of the batch, which has 4"),
    (
        group(0, 8, num_sequences=2),
        "the request needs 4 blocks, but the whole KV cache has only 3 blocks of 4 tokens; "
        "--kv-cache-gib and --kv-cache-dtype of the executor set its size",
    ),
)
def test_what_the_empty_core_cannot_hold_waits_for_ever(candidate: SequenceGroup, reason: str) -> None:
    bench = Bench(small_limits(blocks=3, max_model_len=12, max_num_seqs=4))

    assert obstacle(bench, candidate) == Obstacle(Wait.NEVER, reason)


def test_a_core_whose_oldest_step_is_overdue_takes_nothing() -> None:
    bench = Bench(small_limits())
    bench.add(0, 2)
    bench.schedule()

    assert bench.planner.obstacle(group(1, 2), now_s=1.0) is None
    assert obstacle(bench, group(1, 2), now_s=1.1) == Obstacle(Wait.IN_LINE, "a step has been running for 1.1 s")
    bench.process()
    assert bench.planner.obstacle(group(1, 2), now_s=1.1) is None

"""Groups that are computed with adapters: whose blocks they share, who waits for a slot, and what a load brings."""

import pytest

from octavo_shared.errors import ExecutorFaultError
from octavo_shared.step_wire.step import Adapter, AdapterLoaded, Step
from scheduler_svc.core.step.demand import Obstacle, Wait
from scheduler_svc.core.step.executor_planner import POLL_INTERVAL_S
from scheduler_svc.core.step.slotted_things import AdapterSlots
from tests.support.driving import Bench, max_tokens, small_limits
from tests.support.each_row import each_row
from tests.support.toy_executor import BROKEN, content_of

PROMPT = list(range(8))
ONE, TWO = (Adapter(source, content_of(Adapter(source))) for source in ("one", "two"))


def bench_of(adapter_slots: int = 2, num_load_steps: int = 1) -> Bench:
    limits = small_limits(adapter_slots=adapter_slots, prefix_caching=True, blocks=40)
    return Bench(limits, num_load_steps=num_load_steps)


def adapters_of(step: Step) -> tuple[list[int], list[Adapter]]:
    """Return which slots a step drops, and what it loads."""
    return [*step.delta.adapter_drops], [load.adapter for load in step.delta.adapter_loads]


def test_equal_prompts_share_blocks_with_equal_adapters_only() -> None:
    bench = bench_of()
    for arrival, adapter in enumerate((None, ONE, TWO, ONE, None)):
        added = bench.add(arrival, PROMPT, max_tokens(2), adapter=adapter)
        bench.run()
        assert (added.num_cached_tokens > 0) is (arrival >= 3)
    assert bench.outputs["b"] == bench.outputs["d"] != bench.outputs["c"]


def test_a_source_with_another_content_meets_no_old_block() -> None:
    bench = bench_of()
    bench.add(0, PROMPT, max_tokens(1), adapter=ONE)
    bench.run()
    reloaded = bench.add(1, PROMPT, max_tokens(1), adapter=Adapter("one", TWO.digest))
    verdict = bench.planner.blocks.plan_admission(reloaded)
    assert verdict.sequences[0].num_cached == 0


def test_who_finds_no_slot_waits_and_who_needs_none_passes() -> None:
    bench = bench_of(adapter_slots=1)
    bench.add(0, 2, max_tokens(6), adapter=ONE)
    bench.step()
    waiting, passing = bench.add(1, 2, max_tokens(1), adapter=TWO), bench.add(2, 2, max_tokens(1))
    for _ in range(3):
        bench.step()
    assert bench.planner.obstacle(waiting, 0.0) == Obstacle(
        Wait.SKIPPED, "waits for an adapter slot: requests that run use all 1"
    )
    assert passing not in bench.queue
    steps = bench.run()
    assert [adapters_of(step) for step in steps if step.delta.adapter_loads] == [([0], [TWO])]
    assert len(bench.outputs["b"]) == 1


def test_an_adapter_that_cannot_be_loaded_ends_who_asks_for_it_with_the_executors_words_and_nobody_else() -> None:
    bench = bench_of()
    bench.add(0, 2, max_tokens(3), adapter=Adapter("broken"))
    bench.add(1, 2, max_tokens(3), adapter=ONE)
    for _ in range(20):
        bench.now_s += POLL_INTERVAL_S
        if bench.try_schedule() is not None:
            bench.process()
    [failure] = bench.failures
    assert (failure.group.request_id, failure.message, failure.lacks_adapter) == ("a", BROKEN, True)
    assert len(bench.outputs["b"]) == 3


def test_what_was_loaded_as_any_content_serves_who_names_its_digest_and_no_other_attempt() -> None:
    bench = bench_of()
    bench.add(0, 2, max_tokens(1), adapter=Adapter("one", attempt=1))
    bench.run()
    slots = bench.planner.batch.things.adapters
    assert slots.digests == [ONE.digest, b""]
    bench.add(1, 2, max_tokens(8), adapter=ONE)
    bench.step()
    assert slots.num_followers == [1, 0]  # and goes on to do so, while the same content is loaded once more
    bench.add(2, 2, max_tokens(1), adapter=Adapter("one", attempt=2))
    assert [adapters_of(step)[1] for step in bench.run() if step.delta.adapter_loads] == [[Adapter("one", attempt=2)]]


@each_row(
    ((AdapterLoaded(1, ONE.digest),), "step 1 tells of a load into adapter slot 1 that is not due"),
    ((AdapterLoaded(0, TWO.digest),), "step 1 tells of an adapter with the SHA-256 .* was to be loaded"),
)
def test_an_executor_that_tells_of_another_load_is_at_fault(ends: tuple[AdapterLoaded, ...], words: str) -> None:
    bench = bench_of()
    bench.add(0, 2, adapter=ONE)
    bench.schedule()
    bench.results[0].adapters_loaded = ends
    with pytest.raises(ExecutorFaultError, match=words):
        bench.process()


def test_an_executor_without_slots_never_takes_it() -> None:
    bench, other = bench_of(adapter_slots=0), bench_of()
    added = other.add(0, 2, adapter=ONE)
    assert bench.planner.admissions.why_never(added).endswith(
        "this executor has no slots for adapters (the capability ADAPTERS)"
    )
    assert other.planner.obstacle(added, 0.0) == AdapterSlots.waits

"""What the core notes of groups for people: each admission, preemption and swap once, with its numbers."""

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.request.life import EventKind
from tests.support.driving import Bench, max_tokens, small_limits

Noted = tuple[str, EventKind, int, int]


def taken(bench: Bench) -> list[Noted]:
    """Return what decisions noted since the last call."""
    events, bench.events = bench.events, []
    return [(event.group.request_id, event.kind, event.num_tokens, event.num_computed_tokens) for event in events]


def crowded(mode: PreemptionMode, host_blocks: int = 8) -> Bench:
    """Two prompts of 12 tokens, for whose next tokens there are not enough blocks: b will be preempted."""
    bench = Bench(small_limits(blocks=6, budget=24, host_blocks=host_blocks, preemption_mode=mode))
    for arrival in (0, 1):
        bench.add(arrival, 12, max_tokens(6))
    return bench


def test_an_admission_is_noted_once() -> None:
    bench = Bench(small_limits())
    bench.add(0, 5)
    bench.schedule()
    assert taken(bench) == [("a", EventKind.ADMITTED, 5, 0)]
    bench.process()
    bench.step()
    assert taken(bench) == [], "a decode is nothing to note"


def test_a_preemption_and_the_second_admission() -> None:
    bench = crowded(PreemptionMode.RECOMPUTE)
    bench.run()
    assert taken(bench) == [
        ("a", EventKind.ADMITTED, 12, 0),
        ("b", EventKind.ADMITTED, 12, 0),
        ("b", EventKind.PREEMPTED, 13, 0),
        ("b", EventKind.ADMITTED, 13, 0),
    ]


def test_a_swap_there_and_back() -> None:
    bench = crowded(PreemptionMode.SWAP)
    bench.run()
    assert taken(bench)[2:] == [("b", EventKind.SWAPPED_OUT, 13, 0), ("b", EventKind.SWAPPED_IN, 13, 12)]

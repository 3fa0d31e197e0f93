"""One tenant against another, on a core whose pool is too small for what the first one asks for."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.demand import Obstacle
from tests.support.driving import Bench, group, max_tokens, small_limits
from tests.support.fleet import Member
from tests.support.fleet_driving import FleetBench

MODES = st.sampled_from([None, *PreemptionMode])
# Each example has hundreds of steps.
HALF = settings().max_examples // 2


@dataclass
class Bully:
    """Red has asked for more than the pool holds; blue asks for little, at any time."""

    bench: Bench
    num_arrivals: int = 0

    def add(self, tenant: str, prompt: int, num_outputs: int, num_sequences: int = 1) -> SequenceGroup:
        added = group(self.num_arrivals, prompt, max_tokens(num_outputs), num_sequences=num_sequences, tenant=tenant)
        assert self.bench.planner.admissions.can_ever_admit(added)
        added.request_id = f"{tenant}{self.num_arrivals}"
        self.bench.queue.add(added)
        self.num_arrivals += 1
        return added

    def step(self) -> bool:
        """Return whether there was something to do."""
        if self.bench.try_schedule() is None:
            return False
        self.bench.process()
        return True

    def has_room_for(self, asking: SequenceGroup) -> bool:
        """Return whether slots and blocks of the core suffice for a group with one output."""
        planner = self.bench.planner
        num_free = planner.blocks.allocator.num_free_blocks - planner.blocks.num_watermark_blocks
        return (
            planner.blocks.num_blocks_for(len(asking.prompt_token_ids)) <= num_free and planner.batch.num_free_slots > 0
        )


@pytest.mark.parametrize(
    ("num_requests", "num_outputs", "num_tokens", "num_host_blocks"), [(2, 8, 400, 0), (4, 64, 40, 1024)]
)
def test_whenever_another_tenant_comes_its_first_token_takes_hardly_longer_than_alone(
    num_requests: int, num_outputs: int, num_tokens: int, num_host_blocks: int
) -> None:
    """What red has preempted or swapped out waits all the time, and blocks are free. Alone it takes one step."""
    limits = small_limits(
        max_num_seqs=512,
        budget=2048,
        max_model_len=512,
        block_size=16,
        blocks=256,
        watermark=0.01,
        host_blocks=num_host_blocks,
    )
    bench = FleetBench(limits)
    [member] = bench.members
    reds = [
        group(arrival, 20, max_tokens(num_tokens), num_sequences=num_outputs, tenant="red")
        for arrival in range(num_requests)
    ]
    for red in reds:
        bench.add(red)
    num_waiting_reds = 0
    for arrival in range(20, 26):
        for _ in range(num_tokens // 8):
            step_of(bench, member)
        blue = group(arrival, 10, max_tokens(3), tenant="blue")
        bench.add(blue)
        num_waiting_reds += any(red.has_run and red not in member.planner.batch and red.live_sequences for red in reds)
        num_steps = 0
        while not bench.outputs[arrival, 0].token_ids:
            step_of(bench, member)
            num_steps += 1
        assert num_steps <= 2 * 1 + 3, f"request {arrival} waited for {num_steps} steps"
    assert num_waiting_reds > 1


def step_of(bench: FleetBench, member: Member) -> None:
    bench.step(member)
    while member.results:
        bench.process(member)


@settings(max_examples=HALF)
@given(
    reds=st.lists(st.tuples(st.integers(1, 60), st.integers(20, 120), st.integers(1, 8)), min_size=2, max_size=6),
    num_steps=st.integers(0, 120),
    num_host_blocks=st.sampled_from([0, 24]),
    mode=MODES,
)
def test_who_had_less_is_admitted_in_the_next_step_that_has_room(
    reds: list[tuple[int, int, int]], num_steps: int, num_host_blocks: int, mode: PreemptionMode | None
) -> None:
    """Whatever of another tenant was preempted, is swapped out, or waits: but a step that preempts admits nobody."""
    bench = Bench(small_limits(max_num_seqs=24, budget=128, max_model_len=200, blocks=100, host_blocks=num_host_blocks))
    bully = Bully(bench)
    for prompt, num_outputs, num_sequences in reds:
        if num_sequences * (prompt + num_outputs) < 380:
            bully.add("red", prompt, num_outputs, num_sequences)
    for _ in range(num_steps):
        bully.step()
    blue = bully.add("blue", 3, 4)
    bully.step()  # red's count is blue's until red gets the tokens of this step
    num_waited = 0
    while blue in bench.queue:
        had_room, num_preemptions = bully.has_room_for(blue), sum(bench.planner.preemption.num_preemptions.values())
        bully.step()
        if had_room and sum(bench.planner.preemption.num_preemptions.values()) == num_preemptions:
            assert blue not in bench.queue
        num_waited += 1
        assert num_waited < 1000


@settings(max_examples=HALF // 2 + 2)
@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    red=st.tuples(st.integers(1, 20), st.integers(30, 60), st.integers(2, 6)),
    num_host_blocks=st.sampled_from([0, 40]),
    mode=MODES,
)
def test_what_was_preempted_is_passed_until_the_others_have_had_as_much_and_no_longer(
    prompts: list[int], red: tuple[int, int, int], num_host_blocks: int, mode: PreemptionMode | None
) -> None:
    """Blue never stops asking. Red's preempted requests come back, and both get their shares meanwhile."""
    limits = small_limits(
        max_num_seqs=24, budget=64, max_model_len=96, blocks=80, host_blocks=num_host_blocks, preemption_mode=mode
    )
    bench = Bench(limits)
    bully = Bully(bench)
    reds = [bully.add("red", *red) for _ in range(3)]
    blues: list[SequenceGroup] = []
    longest_wait_tokens = 0
    blue_at_preemption: dict[SequenceGroup, int] = {}
    for number in range(1500):
        if sum(blue in bench.queue for blue in blues[-8:]) < 4:
            blues.append(bully.add("blue", prompts[number % len(prompts)], 3))
        bully.step()
        served = sum(len(bench.outputs[blue.request_id]) + len(blue.prompt_token_ids) for blue in blues)
        for one in reds:
            if one in bench.planner.batch or not one.live_sequences:
                blue_at_preemption.pop(one, None)
            elif one.has_run:
                passed = served - blue_at_preemption.setdefault(one, served)
                longest_wait_tokens = max(longest_wait_tokens, passed)
        if not any(one.live_sequences for one in reds):
            break
    else:
        raise AssertionError("red's requests do not end")
    num_red_tokens = 3 * (red[0] + red[1] * red[2])
    assert longest_wait_tokens <= 2 * num_red_tokens + 24 * 15


@settings(max_examples=HALF)
@given(
    work=st.lists(
        st.tuples(st.sampled_from(["red", "blue"]), st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
        min_size=1,
        max_size=12,
    ),
    cap=st.integers(1, 5),
)
def test_a_cap_of_tenants_holds_over_all_executors_and_stops_nobody_else(
    work: list[tuple[str, int, int, int]], cap: int
) -> None:
    """`VirtualFleet` sees that no tenant runs more; who waits with room everywhere waits for its own tenant."""
    limits = small_limits(max_num_seqs=40, budget=128, max_model_len=32, blocks=400)
    bench = FleetBench(limits, limits, max_num_seqs_per_tenant=cap)
    for arrival, (tenant, prompt, num_outputs, num_sequences) in enumerate(work):
        bench.add(group(arrival, prompt, max_tokens(num_outputs), num_sequences=num_sequences, tenant=tenant))
    while any(waiting.live_sequences for waiting in bench.groups.values()):
        for member in bench.members:
            bench.step(member)
        for waiting in bench.queue:
            num_running = sum(
                running.num_slots
                for member in bench.members
                for running in member.planner.batch.running
                if running.tenant == waiting.tenant
            )
            if not any(other.tenant == waiting.tenant and other.arrival < waiting.arrival for other in bench.queue):
                assert num_running + waiting.num_slots > cap, f"{waiting.request_id} waits, and may run"
                assert isinstance(obstacle := bench.fleet.place(waiting, 0.0), Obstacle)
                assert f"of at most {cap} sequences (its slots" in obstacle.reason
        for member in bench.members:
            while member.results:
                bench.process(member)

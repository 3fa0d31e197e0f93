"""What every count that a limit rests on must be, made anew of where all live groups are.

A group is in exactly one place: it is parked as a suspect, it waits, or a planner has it, which runs it, has preempted
it or swapped it out. One that waits may be dispatched to a planner; then it has its slots already.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from scheduler_svc.core.fleet.fleet import Fleet
from scheduler_svc.core.fleet.inbox import TenantCap
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.waiting.waiting_work import Work
from scheduler_svc.engine.engine import Engine


def slots_of(group: SequenceGroup) -> int:
    """Return how many slots a group needs at once."""
    if group.pooling is not None:
        return 0
    if group.beam_search is not None:
        return group.beam_search.beam_width
    return sum(sequence.status is not SequenceStatus.FINISHED for sequence in group.sequences)


def slots_of_tenants(fleet: Fleet, groups: Iterable[SequenceGroup]) -> dict[str, list[int]]:
    """Return the slots of the groups of each tenant that have some, of all that are live and not parked."""
    assignments = [given for inbox in fleet.dispatcher.inboxes for given in inbox.assignments]
    dispatched = {given.group for given in assignments if given.num_slots}  # without, it is only to be ended
    found: dict[str, list[int]] = {}
    for group in groups:
        if (group in dispatched or group not in fleet.queue) and (num_slots := slots_of(group)):
            found.setdefault(group.tenant, []).append(num_slots)
    return found


def check_counts_of_fleet(fleet: Fleet, groups: Collection[SequenceGroup]) -> None:
    """Assert the counts of a fleet; `groups` are all that are live and not parked."""
    queue, inboxes = fleet.queue, fleet.dispatcher.inboxes
    cap = TenantCap(queue.shares, inboxes)
    slots = Counter({tenant: sum(nums) for tenant, nums in slots_of_tenants(fleet, groups).items()})
    assert +cap._num_seqs_of == slots, "the slots of tenants"
    waiting = [group for group in groups if group in queue]
    assert len(queue) == len(waiting), "somebody waits who has ended"
    assert queue.num_texts == sum(group.pooling is not None for group in waiting)
    dispatched = {given.group for inbox in inboxes for given in inbox.assignments}
    for group in waiting:
        wanted, most = slots_of(group), queue.shares.of(group.tenant).max_num_seqs
        may_run = most is None or 0 in (wanted, slots[group.tenant]) or slots[group.tenant] + wanted <= most
        assert group in dispatched or (cap.obstacle(group) is None) == may_run, f"the slots for {group.request_id}"
    num_held = len(dispatched) + len(fleet.dispatcher.unplaceable)
    assert queue.num_in_line == len(waiting) - num_held
    assert queue.num_prompt_tokens == sum(group.num_input_tokens for group in waiting)
    _check_work(queue.work.total, waiting)
    levels, works = {group: fleet._policy.level(group) for group in waiting}, queue.work.by_tenant()
    for tenant in {group.tenant for group in groups}:
        own = [group for group in waiting if group.tenant == tenant]
        assert queue.num_waiting_of(tenant) == len(own)
        _check_work(works.get(tenant, Work()), own)
        for level in set(levels.values()):
            ahead = [group for group, its in levels.items() if its < level or (its == level and group in own)]
            _check_work(queue.work.ahead_of(level, tenant), ahead)


def _check_work(work: Work, groups: Collection[SequenceGroup]) -> None:
    """Assert the numbers of groups and of tokens of their prompts; outputs may have ended since they were counted."""
    counted = work.num_groups, work.num_prompt_tokens
    assert counted == (len(groups), sum(group.num_input_tokens for group in groups)), "the work that waits"


def check_counts_of_engine(engine: Engine, num_checked_of: Mapping[str, int]) -> None:
    """Assert the counts of an engine; `num_checked_of`: requests that are being checked, by tenant."""
    parked = [request.group for request in engine.requests.suspects.parked]
    groups = [request.group for request in engine.requests.values()]
    for group in groups:
        places = (group in parked) + (group in engine.queue) + sum(group in p.groups for p in engine.fleet.planners)
        assert places == 1, f"{group.request_id} is in {places} places"
    check_counts_of_fleet(engine.fleet, [group for group in groups if group not in parked])
    waiting = [group for group in groups if engine.fleet.planner_of(group) is None]
    limits, num_checked = engine.waiting, sum(num_checked_of.values())
    assert limits.num_waiting == len(waiting) + num_checked, "the requests that wait"
    num_of, num_tokens_of = Counter(num_checked_of), Counter[str]()
    for group in waiting:
        num_of[group.tenant] += 1
        num_tokens_of[group.tenant] += group.num_input_tokens
    assert {tenant: num for tenant, num in limits._requests().num_of.items() if num} == +num_of
    assert {tenant: limits.num_waiting_of(tenant) for tenant in num_of} == num_of
    assert limits.num_prompt_tokens == num_tokens_of.total()
    if limits.settings.max_waiting_tokens is not None:
        assert limits._tokens().num_of == num_tokens_of
    statuses = [(group, [sequence.status for sequence in group.sequences]) for group in groups]
    running = [group for group, status in statuses if SequenceStatus.RUNNING in status]
    load = engine.load
    assert (load.num_requests, load.num_running) == (len(groups), len(running))
    assert load.num_taken_slots == sum(map(slots_of, running)), "the slots of the executors"
    assert load.num_waiting_prompt_tokens == limits.num_prompt_tokens
    assert {request.group for request in engine._waiting_requests()} == set(waiting)
    num_made = {
        group: max(end.num_tokens for end in engine.requests.of(group).ends) for group in running if slots_of(group)
    }
    rests = [max(0, group.expected_len - num) for group, num in num_made.items()]
    assert engine.estimate._shortest_rest(engine.fleet.planners) == min(rests, default=0), "until slots are free"

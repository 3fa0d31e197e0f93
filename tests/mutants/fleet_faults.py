"""Faults in the fleet: the line, the dispatcher, and what becomes of groups when executors are lost."""

from tests.mutants.fault import Fault

CORE = "scheduler_svc/core"
UNIT = "tests/unit/scheduler_svc/core"

WEIGHTS = "tests/contract/test_fleet.py::test_an_executor_of_unknown_weights_joins_and_does_not_hide_those_of_the_fleet"

LIMITS = "scheduler_svc/engine/waiting_limits.py"
SHARED_QUEUE = "tests/unit/scheduler_svc/engine/test_waiting_limits.py"

FAULTS = (
    Fault(
        "a newcomer's tokens do not count in its tenant's turn while it is held",
        f"{CORE}/waiting/waiting_lines.py",
        "self.counter.value_after(self.num_held_tokens), self.groups.first.arrival",
        "self.counter.value_after(0), self.groups.first.arrival",
        (f"{UNIT}/waiting/test_waiting_queue.py",),
    ),
    Fault(
        "a held newcomer that is taken out leaves its tenant's turn as it was",
        f"{CORE}/waiting/waiting_queue.py",
        "                level.renew_entry(group.tenant, level.lines[group.tenant])\n        else:",
        "                pass\n        else:",
        (f"{UNIT}/waiting/test_waiting_queue.py",),
    ),
    Fault(
        "the floor of newcomers is the first entry, stale or not",
        f"{CORE}/waiting/policy.py",
        "            elif (now := self.waiting[tenant].value) > value:",
        "            elif (now := self.waiting[tenant].value) < value:",
        ("tests/property/test_waiting_queue.py",),
    ),
    Fault(
        "a lost core's blocks are looked for on the next one",
        f"{CORE}/blocks/prefix_cache.py",
        "        self._holders.leave(self.bit, list(self._block_of_hash))",
        "        self._holders.leave(self.bit, [])",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "the fleet is not told of an evicted block",
        f"{CORE}/blocks/prefix_cache.py",
        "                del holders_of[block_hash]\n",
        "                pass\n",
        (f"{UNIT}/test_core_prefix_cache.py",),
    ),
    Fault(
        "a prefix counts as deep as it is on any core",
        f"{CORE}/dispatch/placement.py",
        "next((depth.num_blocks for depth in depths if depth.members & capacity.bit), 0)",
        "depths[0].num_blocks if depths else 0",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "what was dispatched does not count for the next one",
        f"{CORE}/dispatch/capacity.py",
        "        self.load += assignment.num_tokens + assignment.num_slots\n",
        "",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "requests with one prefix pile up where it is cached",
        f"{CORE}/dispatch/capacity.py",
        "        return self.load + self.num_rows * row_cost\n",
        "        return self.load\n",
        ("tests/unit/benchmarks/test_shared_prefix.py",),
    ),
    Fault(
        "a core gets more than the budget of a step",
        f"{CORE}/dispatch/capacity.py",
        "has_room = self.num_tokens > 0 and self._has",
        "has_room = self._has",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "a core in doubt gets several groups",
        f"{CORE}/dispatch/capacity.py",
        "        if core.is_probing and (core.groups or self.inbox.assignments):\n            return Wait.IN_LINE\n",
        "",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "a group goes back to the core that it was lost on",
        f"{CORE}/dispatch/placement.py",
        "        if group.lost_on and avoids(",
        "        if not group.lost_on and avoids(",
        (f"{UNIT}/dispatch/test_placement.py",),
    ),
    Fault(
        "nobody makes way for a more urgent group",
        f"{CORE}/dispatch/dispatcher.py",
        "        if not inboxes:\n            return False\n",
        "        if inboxes or not inboxes:\n            return False\n",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "a core is woken for a group that made way and came back",
        f"{CORE}/dispatch/dispatcher.py",
        "                    self._dispatched_to.discard(inbox.core)\n",
        "                    self._dispatched_to.add(inbox.core)\n",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "a stalled core keeps what was dispatched to it",
        f"{CORE}/dispatch/dispatcher.py",
        "inbox is not server and inbox.core.stalled_s(now_s) is not None:",
        "inbox is not server and inbox.core.stalled_s(now_s) is None and now_s < 0:",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "an idle core takes nothing from a busy one",
        f"{CORE}/dispatch/dispatcher.py",
        "        while server is not None:\n",
        "        while server is not None and not self.inboxes:\n",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "what a step does not admit stays in the inbox",
        f"{CORE}/dispatch/dispatcher.py",
        "                    self.queue.release(group)\n                    inbox.refused.add(group)\n",
        "                    inbox.refused.add(group)\n",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "groups that fit no core are not looked at again when one joins",
        f"{CORE}/dispatch/dispatcher.py",
        "        self._release(list(self.unplaceable))\n",
        "",
        (f"{UNIT}/dispatch/test_fleet.py",),
    ),
    Fault(
        "a call dispatches the whole line",
        f"{CORE}/dispatch/dispatcher.py",
        "        for _ in range(MAX_DISPATCHED_GROUPS):\n",
        "        while True:\n",
        (f"{UNIT}/dispatch/test_dispatcher.py",),
    ),
    Fault(
        "a request runs where it would be cut short",
        f"{CORE}/step/admission.py",
        "        if (group.stop_conditions.accepted_len or 0) > self._limits.max_model_len:\n",
        "        if (group.stop_conditions.accepted_len or 0) < 0:\n",
        (f"{UNIT}/dispatch/test_fleet_gaps.py",),
    ),
    Fault(
        "an executor with other weights joins its fleet",
        "scheduler_svc/executors/fleet_model.py",
        "    if knows_digests and digest != served_digest:\n",
        "    if False:\n",
        (WEIGHTS,),
    ),
    Fault(
        "an executor that does not know its weights hides those of the fleet",
        "scheduler_svc/executors/fleet_model.py",
        "sampling_defaults=defaults, weights_digest=digest)",
        "sampling_defaults=defaults)",
        (WEIGHTS,),
    ),
    Fault(
        "a stop string is told to the core that made the token, though the group has gone to another one",
        "scheduler_svc/core/dispatch/fleet.py",
        "            (holder or core).finish(sequence)\n",
        "            core.finish(sequence)\n",
        ("tests/unit/scheduler_svc/core/dispatch/test_fleet.py",),
    ),
    Fault(
        "a request that has begun to run gives way to one that waits",
        LIMITS,
        "elif not group.has_run and",
        "elif",
        (SHARED_QUEUE,),
    ),
    Fault(
        "a tenant's only request gives way",
        LIMITS,
        "                candidates[group.tenant] = []\n",
        "                candidates[group.tenant] = [group]\n",
        (SHARED_QUEUE,),
    ),
    Fault(
        "what is being checked takes the places of others beyond its tenant's share",
        LIMITS,
        "min(num, max(1.0, shares[name])))",
        "num)",
        (SHARED_QUEUE,),
    ),
    Fault(
        "newcomers take the room that a group of a draining executor waits for",
        f"{CORE}/dispatch/dispatcher.py",
        "turn is None or (kept and turn.is_newcomer and self._must_wait_for_moves(placement, turn, now_s, kept))",
        "turn is None",
        (f"{UNIT}/dispatch/test_draining.py",),
    ),
)

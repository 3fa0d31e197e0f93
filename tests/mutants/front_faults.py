"""Faults around the link between fronts and the core: who joins, what ends, how many there are."""

from tests.mutants.fault import Fault

SERVICE = "scheduler_svc"
UNIT = "tests/unit/scheduler_svc"

FAULTS = (
    Fault(
        "any certificate of the authority is that of a front",
        f"{SERVICE}/link/core_port.py",
        "self._trusted_fronts.isdisjoint(names)",
        "not names",
        ("tests/tls/test_own_fronts.py::test_who_is_no_front_does_not_join_and_reads_why",),
    ),
    Fault(
        "a front of its own counts as one that the scheduler has started",
        f"{SERVICE}/link/core_servicer.py",
        "for session in self.sessions if not session.address]",
        "for session in self.sessions]",
        ("tests/contract/test_link.py::test_a_front_of_its_own_is_none_of_ours_whatever_its_name",),
    ),
    Fault(
        "a front of its own takes the place of one that the scheduler has started",
        f"{SERVICE}/link/core_servicer.py",
        "key = bool(peer_address(context)), hello.front_id",
        "key = False, hello.front_id",
        ("tests/contract/test_link.py::test_a_front_of_its_own_is_none_of_ours_whatever_its_name",),
    ),
    Fault(
        "a session that has ended reads on",
        f"{SERVICE}/link/front_session.py",
        "            self._reading.cancel()\n",
        "            pass\n",
        ("tests/contract/test_link.py::test_a_session_that_ends_reads_nothing_more_and_waits_for_no_write",),
    ),
    Fault(
        "an abort is lost while the core is away",
        f"{SERVICE}/link/remote_core.py",
        "        if self._absence.is_on:\n            self._end_here(number, error)\n            return\n",
        "",
        (f"{UNIT}/link/test_remote_core.py::test_what_is_aborted_while_the_core_is_away_ends_at_once",),
    ),
    Fault(
        "what was aborted goes on at the next core, if the one before may not have heard of it",
        f"{SERVICE}/link/remote_core.py",
        "            if request.aborted_with is not None:",
        "            if request.aborted_with is not None and not self._state:",
        (
            f"{UNIT}/link/test_remote_core.py"
            "::test_what_was_aborted_ends_with_its_core_and_no_other_core_goes_on_with_it",
        ),
    ),
    Fault(
        "an abort in the message of its submission is lost",
        f"{SERVICE}/link/front_session.py",
        "            await in_turns(message.aborts, self._abort, ABORTS_AT_ONCE)\n",
        "            numbers = {submission.number for submission in message.submissions}\n"
        "            aborts = [abort for abort in message.aborts if abort.number not in numbers]\n"
        "            await in_turns(aborts, self._abort, ABORTS_AT_ONCE)\n",
        ("tests/contract/test_link.py::test_an_abort_and_credits_in_the_message_of_a_submission_count",),
    ),
    Fault(
        "credits that come with a submission are lost",
        f"{SERVICE}/link/front_session.py",
        "        if message.credits:\n",
        "        if message.credits and not message.submissions:\n",
        ("tests/contract/test_link.py::test_an_abort_and_credits_in_the_message_of_a_submission_count",),
    ),
    Fault(
        "an Abort that comes before its request is forgotten",
        f"{SERVICE}/link/front_session.py",
        "                self._early_aborts.add(call.request_id, tenant)\n",
        "                pass\n",
        (
            "tests/contract/test_link.py"
            "::test_an_abort_that_comes_before_its_request_ends_it_and_no_later_one_of_the_same_id",
        ),
    ),
    Fault(
        "any attempt takes a request over",
        f"{SERVICE}/engine/engine.py",
        "        if request.continuation.attempt > live.attempt or is_fresh:\n",
        "        if request.continuation.attempt or is_fresh:\n",
        ("tests/contract/test_continuation.py::test_the_call_that_still_has_the_request_is_told",),
    ),
    Fault(
        "an older session of a front replaces a newer one",
        f"{SERVICE}/link/core_servicer.py",
        "            if hello.session <= number:\n",
        "            if hello.session < 0:\n",
        ("tests/contract/test_link.py::test_a_newer_session_of_a_front_ends_the_older_one_and_its_requests_first",),
    ),
    Fault(
        "a core ignores a larger incarnation",
        f"{SERVICE}/incarnation.py",
        "        if told < self.number or (told == self.number and self._is_granted):\n",
        "        if told:\n",
        ("tests/contract/test_incarnations.py::test_a_core_ends_that_finds_a_larger_incarnation_in_its_place",),
    ),
    Fault(
        "what a core was told is forgotten when it ends",
        f"{SERVICE}/executors/client.py",
        "0 if self._incarnation is None else self._incarnation.largest_told",
        "0",
        (
            "tests/contract/test_incarnations.py"
            "::test_a_front_that_joined_a_later_core_ends_the_one_in_its_place_and_joins_the_next",
        ),
    ),
    Fault(
        "a front takes the number of one scheduler for that of another one",
        f"{SERVICE}/link/core_servicer.py",
        '        if hello.scheduler_id not in ("", own.scheduler_id):\n',
        "        if False:\n",
        ("tests/contract/test_incarnations.py",),
    ),
    Fault(
        "a core that was granted nothing gives its number to fronts",
        f"{SERVICE}/incarnation.py",
        "        return self.number if self._is_granted else 0\n",
        "        return self.number\n",
        ("tests/unit/scheduler_svc/test_incarnation.py",),
    ),
    Fault(
        "a front that finds no core asks again and again at once",
        f"{SERVICE}/link/remote_core.py",
        "min(2 * self._pause_s, LONGEST_PAUSE_S)",
        "self._pause_s",
        (f"{UNIT}/link/test_remote_core.py::test_a_front_asks_for_its_core_ever_less_often_until_it_has_one",),
    ),
    Fault(
        "a front whose core went again waits for it as long as for an executor",
        f"{SERVICE}/link/absence.py",
        "        if not self.is_on or self._is_core_back:\n",
        "        if not self.is_on:\n",
        (f"{UNIT}/link/test_absence.py::test_a_core_without_an_executor_is_waited_for_as_long_as_orphans_are",),
    ),
    Fault(
        "a front waits for the executor of its next core no longer than for that core",
        f"{SERVICE}/link/remote_core.py",
        "            self._absence.wait_for_executor(self._state.orphan_timeout_s or LIMIT_S)\n",
        "",
        ("tests/contract/test_link.py::test_what_a_front_has_waits_for_an_executor_as_orphans_do",),
    ),
    Fault(
        "a front of its own serves tenants that the core refuses",
        f"{SERVICE}/front_service.py",
        "tenants=frozenset(welcome.tenants) or None, has_priorities=welcome.has_priorities",
        "tenants=None, has_priorities=True",
        ("tests/tls/test_own_fronts.py::test_the_core_says_which_tenants_are_served_and_whether_priorities_count",),
    ),
    Fault(
        "a front ends without sending its traces",
        f"{SERVICE}/front_service.py",
        "            await self.front.close(max(left_s, FLUSH_SHARE * self._grace_s))\n",
        "            del left_s\n",
        ("tests/tracing/test_traced_processes.py::test_fronts_send_their_traces_before_they_end",),
    ),
    Fault(
        "the limits of cgroups do not count for --fronts auto",
        f"{SERVICE}/front_count.py",
        "*cgroup_limits(root), float",
        "float",
        (f"{UNIT}/test_front_count.py",),
    ),
)

"""Faults in the client and in `octavo bench`."""

from tests.mutants.fault import Fault

UNIT = "tests/unit/octavo"

FAULTS = (
    Fault(
        "a service that is started again has other ports",
        "octavo/child_process.py",
        "        if not self.address:\n",
        "        if True:\n",
        (f"{UNIT}/test_restarts.py::test_a_service_that_is_killed_is_back_on_its_ports",),
    ),
    Fault(
        "octavo up ends with the first executor that it gives up",
        "octavo/restarts.py",
        "if all(other.service != child.service for other in children.values())",
        "if True",
        (f"{UNIT}/test_restarts.py::test_one_that_cannot_start_any_more_is_given_up_and_the_others_go_on",),
    ),
    Fault(
        "octavo demo finds every answer the same",
        "octavo/commands/demo.py",
        "    if list(token_ids) == list(undisturbed):\n",
        "    if True:\n",
        (f"{UNIT}/test_demo.py",),
    ),
    Fault(
        "each of several executors takes all cores",
        "octavo/local_options.py",
        "num_threads(self.num_executors * config.tp)",
        "num_threads(config.tp)",
        (f"{UNIT}/test_local.py::test_several_executors_share_the_cores",),
    ),
    Fault(
        "a time limit of ages is over at once",
        "octavo/client.py",
        "min(timeout_s, _LONGEST_TIMEOUT_S)",
        "timeout_s",
        (f"{UNIT}/test_client.py::test_a_time_limit_of_ages_does_not_end_at_once",),
    ),
    Fault(
        "an answer without its end passes for a whole one",
        "octavo/client.py",
        "        if not is_finished:\n",
        "        if False:\n",
        (f"{UNIT}/test_client.py",),
    ),
    Fault(
        "a missing token is an internal error to the client",
        "octavo/errors.py",
        "            return UnauthenticatedError(message)\n",
        "            return InternalError(message)\n",
        (f"{UNIT}/test_errors.py::test_each_code_has_its_error",),
    ),
    Fault(
        "the client does not say which field is wrong",
        "octavo/errors.py",
        "    return bad_request.field_violations[0].field or None\n",
        "    return None\n",
        (f"{UNIT}/test_errors.py::test_bad_request_names_the_field",),
    ),
    Fault(
        "a token travels to other machines in plaintext",
        "octavo/bearer_token.py",
        "    if not is_encrypted and not is_loopback(address):\n",
        "    if False:\n",
        ("tests/tls/test_client.py::test_a_token_travels_in_plaintext_on_this_machine_only",),
    ),
    Fault(
        "bench reports a wrong percentile",
        "octavo/bench/summary.py",
        "np.percentile(found, (50, 90, 95, 99))",
        "np.percentile(found, (50, 90, 95, 95))",
        (f"{UNIT}/bench/test_summary.py",),
    ),
    Fault(
        "goodput leaves out requests that failed",
        "octavo/bench/summary.py",
        "record.outcome is not Outcome.CANCELLED for record in records",
        "record.outcome is Outcome.COMPLETED for record in records",
        (f"{UNIT}/bench/test_summary.py::test_goodput_counts_failed_requests_and_not_cancelled_ones",),
    ),
    Fault(
        "requests that follow one another count as running at once",
        "octavo/bench/summary.py",
        "    changes = sorted([(begin, 1) for begin, _ in spans_s] + [(end, -1) for _, end in spans_s])\n",
        "    changes = sorted([(begin, 1) for begin, _ in spans_s] + [(end, 2) for _, end in spans_s])\n"
        "    changes = [(time_s, -1 if change == 2 else 1) for time_s, change in changes]\n",
        (f"{UNIT}/bench/test_summary.py::test_requests_that_follow_one_another_do_not_run_at_once",),
    ),
    Fault(
        "the mean time per token counts the first part",
        "octavo/bench/record.py",
        "        num_tokens = sum(self.event_num_tokens[1:])\n",
        "        num_tokens = sum(self.event_num_tokens)\n",
        (f"{UNIT}/bench/test_record.py",),
    ),
    Fault(
        "bursts change the rate of a load",
        "octavo/bench/arrivals.py",
        "1 / (rate * burstiness)",
        "1 / rate",
        (f"{UNIT}/bench/test_arrivals.py",),
    ),
    Fault(
        "a line end that is cut in two ends two lines",
        "octavo/bench/sse.py",
        '            chunk = chunk.removeprefix(b"\\n")',
        '            chunk = chunk.removeprefix(b"")',
        (f"{UNIT}/bench/test_sse.py",),
    ),
)

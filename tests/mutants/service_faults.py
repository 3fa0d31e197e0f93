"""Faults in the scheduler's service: its session with an executor, text, who may call, metrics."""

from tests.mutants.fault import Fault

SERVICE = "scheduler_svc"
UNIT = "tests/unit/scheduler_svc"
CONTRACT = "tests/contract"
TLS = "tests/tls"

FAULTS = (
    # The session with an executor
    Fault(
        "a step that was executed is sent again",
        f"{SERVICE}/executors/session.py",
        "            if message.step_id > first.started.last_executed_step_id:\n",
        "            if message.step_id >= first.started.last_executed_step_id:\n",
        (f"{CONTRACT}/test_executor_loss.py::test_a_broken_stream_is_resumed_without_a_new_epoch",),
    ),
    Fault(
        "an executor may say that it is larger than any machine",
        f"{SERVICE}/executors/client.py",
        "        if size > most:\n",
        "        if False:\n",
        (f"{UNIT}/executors/test_client.py",),
    ),
    Fault(
        "a result that cannot be read ends the scheduler's task",
        f"{SERVICE}/executors/session.py",
        "        except InvalidStepError as error:\n            raise ExecutorLostError",
        "        except ExecutorLostError as error:\n            raise ExecutorLostError",
        (f"{CONTRACT}/test_fleet.py::test_an_executor_that_answers_nonsense_is_lost_and_the_log_says_what_was_wrong",),
    ),
    # Text
    Fault(
        "a stop string that spans several tokens is not found",
        f"{SERVICE}/front/text/stop_strings.py",
        "        self.num_matched = matched\n        return None\n",
        "        return None\n",
        (f"{UNIT}/front/text/test_stop_strings.py",),
    ),
    Fault(
        "the beginning of a stop string is delivered",
        f"{SERVICE}/front/text/stop_strings.py",
        "        num_held = max((p.num_matched for p in self._progresses), default=0)\n",
        "        num_held = 0\n",
        (f"{UNIT}/front/text/test_stop_strings.py",),
    ),
    Fault(
        "the last of several stop strings counts",
        f"{SERVICE}/front/text/stop_strings.py",
        "            end, _, stop = min(matches)\n",
        "            end, _, stop = max(matches)\n",
        (f"{UNIT}/front/text/test_stop_strings.py",),
    ),
    Fault(
        "a false start hides a stop string that begins inside it",
        f"{SERVICE}/front/text/stop_strings.py",
        "                    matched = borders[matched - 1]\n                if text",
        "                    matched = 0\n                if text",
        (f"{UNIT}/front/text/test_stop_strings.py",),
    ),
    Fault(
        "a stop string ends an output before min_tokens",
        f"{SERVICE}/front/text/output_text.py",
        "may_stop=not is_early",
        "may_stop=True",
        (f"{UNIT}/front/text/test_output_text.py",),
    ),
    Fault(
        "half a character is delivered",
        f"{SERVICE}/front/text/detokenizer.py",
        "        if not text.endswith(REPLACEMENT):\n",
        "        if True:\n",
        (f"{UNIT}/front/text/test_detokenizer.py",),
    ),
    Fault(
        "best_of returns the least likely outputs",
        f"{SERVICE}/front/response.py",
        "sorted(self._made, key=_cumulative_logprob, reverse=True)",
        "sorted(self._made, key=_cumulative_logprob)",
        (f"{UNIT}/front/test_response.py",),
    ),
    Fault(
        "text that was held back is lost at the end",
        f"{SERVICE}/front/response.py",
        "        if rest:\n",
        "        if False:\n",
        (f"{UNIT}/front/test_response.py",),
    ),
    Fault(
        "log-probabilities that a neighbour asked for are returned",
        f"{SERVICE}/front/response.py",
        "logprob if self._has_logprobs else None",
        "logprob",
        (f"{UNIT}/front/test_response.py",),
    ),
    # Who may call
    Fault(
        "a tenant may use another one's name",
        f"{SERVICE}/front/access/identity.py",
        '        if requested not in ("", self.tenant):\n',
        "        if False:\n",
        (f"{TLS}/test_access.py::test_a_request_belongs_to_the_tenant_of_its_token",),
    ),
    Fault(
        "everybody with a token is an operator",
        f"{SERVICE}/front/access/access_control.py",
        "service in self._operator_services and not identity.is_operator",
        "False",
        (f"{TLS}/test_access.py::test_operators_alone_see_the_admin_service",),
    ),
    Fault(
        "health wants a token",
        f"{SERVICE}/front/access/access_control.py",
        "        if service == health.SERVICE_NAME:\n",
        "        if not service:\n",
        (f"{TLS}/test_access.py::test_health_is_open_and_reflection_is_not",),
    ),
    Fault(
        "a request is decoded before anybody asks whose it is",
        f"{SERVICE}/front/access/access_control.py",
        "guarded, handler.request_deserializer if deserialize is None else None, handler.response_serializer",
        "guarded, handler.request_deserializer, handler.response_serializer",
        (f"{TLS}/test_access.py::test_a_stranger_makes_the_scheduler_do_nothing",),
    ),
    Fault(
        "the search for a token ends at the first one",
        f"{SERVICE}/front/access/token_table.py",
        "                found = identity\n",
        "                return identity\n",
        (f"{TLS}/test_access.py::test_every_entry_is_compared_in_constant_time",),
    ),
    Fault(
        "two tenants may have one token",
        f"{SERVICE}/front/access/token_table.py",
        "        if token in line_of:\n",
        "        if False:\n",
        (f"{TLS}/test_token_table.py",),
    ),
    Fault(
        "tenant and salt run into each other",
        f"{SERVICE}/front/api/group_validation.py",
        'len(name).to_bytes(8, "little") + name + cache_salt.encode()',
        "name + cache_salt.encode()",
        (f"{UNIT}/front/api/test_group_validation.py::test_where_the_tenant_ends_and_the_salt_begins_matters",),
    ),
    Fault(
        "clients need no certificate where one is demanded",
        "shared/tls.py",
        "require_client_authentication=self._demands_client_certificate",
        "require_client_authentication=False",
        (f"{TLS}/test_executor_hop.py::test_no_client_certificate_where_one_is_demanded",),
    ),
    Fault(
        "an expired certificate is taken",
        "shared/certificates.py",
        "    if now > end:\n",
        "    if False:\n",
        (f"{TLS}/test_files.py::test_an_expired_certificate_is_refused",),
    ),
    Fault(
        "a renewed file is not read",
        "shared/watched_files.py",
        "            if signature != self._signature or (self._trouble and self._clock() >= self._retry_at_s):\n",
        "            if self._trouble:\n",
        (f"{TLS}/test_renewal.py",),
    ),
    # What is told
    Fault(
        "a full queue does not say when to come back",
        "shared/grpc_status.py",
        "        return [error_details_pb2.RetryInfo(retry_delay=delay)]\n",
        "        return []\n",
        ("tests/unit/shared/test_grpc_status.py::test_a_full_queue_travels_with_retry_info",),
    ),
    Fault(
        "cached blocks count as used",
        f"{SERVICE}/telemetry/metrics.py",
        "pool.num_used_blocks / pool.num_blocks for address",
        "(pool.num_used_blocks + pool.num_cached_blocks) / pool.num_blocks for address",
        ("tests/monitoring/test_gauges.py::test_cached_blocks_are_free_and_prefix_hits_are_tokens",),
    ),
    Fault(
        "the gauge of waiting requests stays at 0",
        f"{SERVICE}/telemetry/metrics.py",
        "WAITING.single(engine.waiting.num_waiting)",
        "WAITING.single(0)",
        ("tests/monitoring/test_gauges.py::test_who_runs_and_who_waits_is_told_while_it_is_so",),
    ),
    Fault(
        "preemptions are not counted",
        f"{SERVICE}/telemetry/metrics.py",
        "{mode.value: num for mode, num in engine.fleet.num_preemptions.items()}",
        "{mode.value: 0 for mode in engine.fleet.num_preemptions}",
        ("tests/monitoring/test_gauges.py::test_preemptions_are_counted_by_what_became_of_their_blocks",),
    ),
    Fault(
        "every prompt token counts as found in the prefix cache",
        f"{SERVICE}/telemetry/metrics.py",
        "HIT_TOKENS.single(meter.num_hit_tokens)",
        "HIT_TOKENS.single(meter.num_queried_tokens)",
        ("tests/monitoring/test_gauges.py::test_cached_blocks_are_free_and_prefix_hits_are_tokens",),
    ),
    Fault(
        "a value on a bound of a histogram belongs above it",
        "shared/histogram.py",
        "bisect_left(self._bounds, value)",
        "bisect_left(self._bounds, value * (1 + 1e-9))",
        ("tests/unit/shared/test_histogram.py::test_a_value_on_a_bound_belongs_below_it",),
    ),
    Fault(
        "a request that outlived an executor does not count as recovered",
        f"{SERVICE}/telemetry/meter.py",
        "        self.num_recovered += ended.num_losses > 0\n",
        "",
        (f"{UNIT}/telemetry/test_meter.py::test_a_request_that_finished_after_a_loss_is_recovered",),
    ),
)

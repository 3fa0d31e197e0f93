"""Counts of what leaves no trace in the scheduler's state: tokens, times, ends, losses.

The engine's parts report what happens, in plain numbers; nothing here knows Prometheus' library, and
nothing is done for a single token. What the state shows (queue, batch, blocks) is not counted but
read at each scrape. `metrics.py` turns both into metrics.
"""

from collections import Counter
from collections.abc import Sequence

from octavo_shared.process.histogram import Histogram
from octavo_shared.step_wire.step import NO_LOGPROBS, PoolingTask, RowFlag, StepResult
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step.executor_planner import ExecutorPlanner
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.life import EndedRequest
from scheduler_svc.telemetry.recent_steps import RecentStep
from scheduler_svc.telemetry.tenant_names import TenantNames

# Doubling from 10 ms to 82 s, as in OpenTelemetry's conventions for generative AI for the duration of a
# request; from 1.25 ms on, as a small model with a cached prompt gives its first token that soon.
REQUEST_BOUNDS_S = tuple(0.01 * 2**power for power in range(-3, 14))

# The bounds of the same conventions for the time of an output token, and 1, 2.5 and 5 ms below them: a step of a
# small model on a GPU.
TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

# From a decision for one sequence to a step that times out; each at most 2.5 times the one before.
STEP_BOUNDS_S = (*(scale * 10**power for power in range(-4, 1) for scale in (1.0, 2.5, 5.0)), 10.0)

PHASES = ("schedule", "wait", "execute", "process")


class Meter:
    """Counts of one scheduler since its start, over all attachments.

    Attributes:
        time_to_first_token: Of requests that got a first token, in seconds.
        inter_token_latency: Between steps that brought tokens to the same request, in seconds.
        queue_time: From the arrival to the first step, in seconds.
        request_duration: Of requests that finished, in seconds.
        step_durations: Of each phase, in seconds.
        step_turnaround: From the arrival of a result to the begin of the write of the next step, in seconds.
        num_encoder_tokens_of: Of requests with a first token, those that their encoder reads: computed, or found.
        num_finished: Requests that finished, by the reason of their first output.
        num_errors: Requests that ended with an error, by its status code.
        num_flagged: Those of them that ended because one of their rows had a flag, by the flag.
        num_pooled: Pooling requests that were answered, by their task.
        num_pooled_tokens: The tokens of their texts.
        num_requests_of: Requests that ended, by the name of their tenant in metrics.
        num_output_tokens_of: The tokens of their outputs.
        num_requests_with: Those of them with an adapter, by its name in metrics.
        num_output_tokens_with: The tokens of their outputs.
    """

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(REQUEST_BOUNDS_S)
        self.inter_token_latency = Histogram(TOKEN_BOUNDS_S)
        self.queue_time = Histogram(REQUEST_BOUNDS_S)
        self.request_duration = Histogram(REQUEST_BOUNDS_S)
        self.step_durations = {phase: Histogram(STEP_BOUNDS_S) for phase in PHASES}
        self.step_turnaround = Histogram(STEP_BOUNDS_S)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_hit_tokens_of = {"host": 0, "executor": 0}  # by place; the others were on the device
        self.num_encoder_tokens_of = {"computed": 0, "found": 0}  # by outcome
        self.num_finished: Counter[str] = Counter()
        self.num_errors: Counter[str] = Counter()
        self.num_flagged: Counter[RowFlag] = Counter()
        self.num_pooled: Counter[PoolingTask] = Counter()
        self.num_pooled_tokens = 0
        self.num_requests_of: Counter[str] = Counter()
        self.num_output_tokens_of: Counter[str] = Counter()
        self.num_requests_with: Counter[str] = Counter()
        self.num_output_tokens_with: Counter[str] = Counter()
        self._tenants, self._adapters = TenantNames(), TenantNames()
        self.num_executor_losses = 0
        self.num_void_rows = 0
        self.num_drafts = 0
        self.num_accepted_drafts = 0
        self.num_recovered = 0

    def drafts_proved(self, result: StepResult) -> int:
        """Count the drafts of a step, and return how many there were."""
        drafts, counts = result.draft_counts, result.token_counts
        assert drafts is not None
        assert counts is not None
        num_drafts = int(drafts.sum())
        self.num_drafts += num_drafts
        self.num_accepted_drafts += int(counts.sum()) - sum(count > 0 for count in counts.tolist())
        return num_drafts

    def step_processed(self, logged: RecentStep) -> None:
        """Count a step whose result was given to the requests: its times are complete."""
        assert logged.result is not None
        execute_s = logged.result.execute_duration_us * 1e-6
        durations = self.step_durations
        durations["schedule"].observe(logged.logged_at_s - logged.decided_at_s)
        durations["wait"].observe(max(0.0, logged.answered_at_s - logged.logged_at_s - execute_s))
        durations["execute"].observe(execute_s)
        durations["process"].observe(logged.processed_at_s - logged.answered_at_s)

    def tokens_delivered(self, num_tokens: int, last_tokens_at_s: Sequence[float], now_s: float) -> None:
        """Count the tokens that a step brought.

        Args:
            num_tokens: How many, over all outputs.
            last_tokens_at_s: When the requests got their tokens before these; only of requests that had some.
            now_s: When these tokens came.
        """
        self.num_output_tokens += num_tokens
        if not last_tokens_at_s:
            return
        # Nearly always all had their last token with the same step; checking that is cheaper than counting.
        first_s = last_tokens_at_s[0]
        is_same = last_tokens_at_s.count(first_s) == len(last_tokens_at_s)
        num_requests_of = {first_s: len(last_tokens_at_s)} if is_same else Counter(last_tokens_at_s)
        for last_s, num_requests in num_requests_of.items():
            if last_s < now_s:  # not another output of the same request in this step
                self.inter_token_latency.observe(now_s - last_s, num_requests)

    def first_token(self, request: LiveRequest, planner: ExecutorPlanner) -> None:
        """Count a first token, from a step of a planner: the request's prompt is computed."""
        group, times = request.group, request.times
        if times.time_to_first_token_s is not None:
            self.time_to_first_token.observe(times.time_to_first_token_s)
        if times.queue_s is not None:
            self.queue_time.observe(times.queue_s)
        self.num_prompt_tokens += group.num_input_tokens
        if group.encoder_token_ids is not None:
            outcome = "found" if group.has_found_input else "computed"
            self.num_encoder_tokens_of[outcome] += len(group.encoder_token_ids)
        if planner.blocks.prefix_cache is not None and group.num_prompt_logprobs == NO_LOGPROBS:
            self.num_queried_tokens += group.num_prompt_tokens
            self.num_hit_tokens += group.num_cached_tokens
            self.num_hit_tokens_of["host"] += group.num_brought_tokens
            self.num_hit_tokens_of["executor"] += group.num_pulled_tokens

    def text_pooled(self, group: SequenceGroup) -> None:
        """Count a request that got its vector or its scores."""
        assert group.pooling is not None
        self.num_pooled[group.pooling] += 1
        self.num_pooled_tokens += group.num_prompt_tokens

    def request_ended(self, ended: EndedRequest) -> None:
        """Count a request that has ended in any way."""
        tenant = self._tenants.label(ended.tenant)
        self.num_requests_of[tenant] += 1
        num_output_tokens = max(0, ended.num_output_tokens - ended.num_earlier_tokens)
        self.num_output_tokens_of[tenant] += num_output_tokens
        if ended.lora_adapter:
            adapter = self._adapters.label(ended.lora_adapter)
            self.num_requests_with[adapter] += 1
            self.num_output_tokens_with[adapter] += num_output_tokens
        times = ended.times
        if times.first_token_at_s is None and times.queue_s is not None:
            self.queue_time.observe(times.queue_s)
        if ended.error_code is not None:
            self.num_errors[ended.error_code] += 1
            return
        assert ended.finish_reason is not None, "it finished"
        self.num_finished[ended.finish_reason.value] += 1
        self.num_recovered += ended.num_losses > 0
        if times.duration_s is not None:
            self.request_duration.observe(times.duration_s)

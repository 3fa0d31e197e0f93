"""What metrics and log lines cost the scheduler: CPU time of decode steps with and without them, side by side.

    python -m benchmarks.metrics_cost [--sequences 32,256] [--steps 400] [--json FILE]

A step is what the scheduler computes for it by itself: the decision, the message to the executor, the result, text
for every token, and one message to every client. What a step costs the process with gRPC is measured with real services
and the fake executor, and the share is of that. Of the steps of one scheduler, every
other one goes without anything that is there for metrics. Requests end after 200 tokens on
average, so each step has its share of ends, each with a log line. All figures are CPU time of the calling thread.

A scrape is what the event loop does for it; the thread that writes the page comes on top.
"""

import argparse
import asyncio
import dataclasses
import io
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import octavo
from benchmarks.machine import describe_machine
from benchmarks.scheduler_core import BLOCK_SIZE, FIRST_ORDINARY_ID, CoreBench, limits_for
from scheduler_svc.core.dispatch.fleet import Fleet
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.waiting.policy import FcfsPolicy
from scheduler_svc.core.waiting.waiting_queue import WaitingQueue
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.live_requests import LiveRequests
from scheduler_svc.front.api.generation_messages import event_message
from scheduler_svc.front.output import AnswerOptions
from scheduler_svc.front.response import Response
from scheduler_svc.front.text.output_text import TextOptions
from scheduler_svc.request.engine_request import EngineRequest
from scheduler_svc.request.outputs import FinishReason
from scheduler_svc.request.parameters import StopConditions
from scheduler_svc.telemetry.meter import Meter
from scheduler_svc.telemetry.metrics import METRICS, scheduler_families
from scheduler_svc.telemetry.request_log import log_end
from scheduler_svc.telemetry.step_log import LoggedStep, StepLog
from shared.events import JsonFormatter
from shared.step import Int32Array, SamplingRow
from shared.wire import encode_step
from tests.monitoring.live import scrape, value_of
from tests.support.idle_engine import IdleEngine
from tests.support.processes import running_service
from tests.support.tokenizers import byte_level_backend, make_tokenizer

NUM_SEQUENCES = (32, 256)
NUM_STEPS = 400
NUM_WARM_UP_STEPS = 20
TOKENS_PER_REQUEST = 200
PROMPT_TOKENS = 100
# Of the measured calls: other load on the machine, which shares its caches, shows little there.
QUIET_PERCENTILE = 10
NUM_PRINTABLE = 90  # tokens are bytes of text


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds of a step, of a request's end, of a scrape."""

    num_sequences: int
    without_us: float
    with_us: float
    end_us: float
    scrape_us: float
    service_us: float  # of the scheduler's process, metrics and log lines included

    @property
    def added_us(self) -> float:
        """What a step takes longer, with its share of the ends of requests."""
        return self.with_us - self.without_us + self.end_us * self.num_sequences / TOKENS_PER_REQUEST

    @property
    def share(self) -> float:
        """That, of what a step costs the process."""
        return self.added_us / self.service_us


class _Unmetered(Meter):
    def tokens_delivered(self, *args: object) -> None:
        pass

    def first_token(self, *args: object) -> None:
        pass


class _Unwatched(LiveRequests):
    """Live requests without times."""

    def _note_progress(self, request: LiveRequest, *args: object) -> None:
        if request.has_ended:
            self._forget(request, 0.0)
        elif self.suspects.current is not None:
            self._clear_suspect(request)


class Side:
    """A scheduler between executor and clients, without either; its sequences decode, each ever longer.

    Every step goes through one of two sets of what looks at steps: one that keeps times and counts, one that does not.
    """

    def __init__(self, num_sequences: int, num_steps: int) -> None:
        tokenizer = make_tokenizer(byte_level_backend())
        num_blocks_each = -(-(PROMPT_TOKENS + num_steps + 2 * BLOCK_SIZE) // BLOCK_SIZE)
        self._bench = _PrintableCore(
            limits_for(num_sequences, num_blocks_each * num_sequences, num_blocks_each, budget=2**31 - 1)
        )
        self.meter = Meter()
        self.requests = LiveRequests(Fleet(self._bench.queue, FcfsPolicy()), lambda: None, self.meter)
        self._responses: list[Response] = []
        self._step_log = StepLog(observe=self.meter.step_processed)
        unwatched = _Unwatched(Fleet(WaitingQueue(FcfsPolicy()), FcfsPolicy()), lambda: None, _Unmetered())
        for number in range(num_sequences):
            group = SequenceGroup(
                request_id=str(number),
                prompt_token_ids=self._bench.random_tokens(PROMPT_TOKENS + number % BLOCK_SIZE),
                sampling=SamplingRow(),
                stop_conditions=StopConditions(None, ignore_eos=True),
                arrival=number,
            )
            asked = EngineRequest(group.request_id, group.prompt_token_ids, group.sampling, group.stop_conditions)
            response = Response(asked, AnswerOptions(1, 1, False, TextOptions()), tokenizer)
            request = LiveRequest(group, response, time.monotonic())
            self._responses.append(response)
            self.requests.add(request)
            unwatched.add(request)
        self._sets = ((unwatched, StepLog()), (self.requests, self._step_log))
        while len(self._bench.queue) or self._bench.core.prefills.running:
            self.step_us(is_watched=True)

    def step_us(self, *, is_watched: bool) -> float:
        """Take a step; return its CPU time."""
        requests, step_log = self._sets[is_watched]
        begin_ns = time.thread_time_ns()
        decided_at_s = time.monotonic()
        step = self._bench.schedule()
        step_log.add(LoggedStep(step, self._bench.core.in_flight[-1].layout, decided_at_s=decided_at_s))
        encode_step(step)
        scheduled_ns = time.thread_time_ns()
        result = self._bench.next_result()
        answered_ns = time.thread_time_ns()
        answered_at_s = time.monotonic()
        requests.deliver(self._bench.core, self._bench.core.process(result))
        step_log.set_result(result, answered_at_s)
        for response in self._responses:
            _send_news(response)
        return (scheduled_ns - begin_ns + time.thread_time_ns() - answered_ns) / 1000


class _PrintableCore(CoreBench):
    def random_tokens(self, num_tokens: int) -> Int32Array:
        return FIRST_ORDINARY_ID + 30 + super().random_tokens(num_tokens) % NUM_PRINTABLE


def _send_news(response: Response) -> None:
    """Make the message of what is new, as the request's stream does."""
    try:
        response.next_delta().send(None)
    except StopIteration as done:
        event_message(done.value).SerializeToString()


def measure(num_sequences: int, num_steps: int) -> Cost:
    """Measure a batch of so many sequences."""
    without_us, with_us, side = measure_steps(num_sequences, num_steps)
    service_us = asyncio.run(measure_service(num_sequences, num_steps))
    return Cost(num_sequences, without_us, with_us, measure_end(side), measure_scrape(num_sequences), service_us)


def measure_steps(num_sequences: int, num_steps: int) -> tuple[float, float, Side]:
    """Return the CPU microseconds of a step without and with metrics, and what took the steps."""
    side = Side(num_sequences, NUM_WARM_UP_STEPS + 2 * num_steps)
    for _ in range(NUM_WARM_UP_STEPS):
        side.step_us(is_watched=True)
    pairs = np.empty((num_steps, 2))
    for number in range(num_steps):
        for is_watched in (False, True) if number % 2 else (True, False):
            pairs[number, int(is_watched)] = side.step_us(is_watched=is_watched)
    assert side.meter.inter_token_latency.num_observed >= num_sequences * num_steps
    without_us = float(np.median(pairs[:, 0]))
    # Other load on the machine meets both steps of a pair.
    return without_us, without_us + float(np.median(pairs[:, 1] - pairs[:, 0])), side


async def measure_service(num_sequences: int, num_steps: int) -> float:
    """Return the CPU microseconds of a step in a scheduler process whose clients read a stream each."""
    flags = ("--max-num-seqs", str(num_sequences), "--log-level", "warning")
    async with running_service("executor_svc.fake", *flags) as executor:
        scheduler_flags = ("--executor", executor.address, "--metrics-listen", "127.0.0.1:0", "--log-level", "warning")
        async with (
            running_service("scheduler_svc", *scheduler_flags) as scheduler,
            octavo.Client(scheduler.address) as client,
        ):
            await client.wait_until_ready()
            before = await _cpu_and_steps(scheduler.other_addresses["metrics"])
            params = octavo.SamplingParams(max_tokens=num_steps, temperature=0.0)
            prompts = [[33 + number % 90, 33 + number // 90] for number in range(num_sequences)]
            await asyncio.gather(*(client.generate(prompt, params) for prompt in prompts))
            after = await _cpu_and_steps(scheduler.other_addresses["metrics"])
    return 1e6 * (after[0] - before[0]) / (after[1] - before[1])


async def _cpu_and_steps(address: str) -> tuple[float, float]:
    """Return the seconds of CPU time of a scheduler, and its steps."""
    page = await scrape(address)
    return (
        value_of(page, "process_cpu_seconds_total"),
        value_of(page, "octavo_step_duration_seconds_count", phase="process"),
    )


def measure_end(side: Side) -> float:
    """Return the CPU microseconds of what is counted and logged when a request ends."""
    logger, stream = logging.getLogger("scheduler_svc.telemetry.request_log"), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        requests = list(side.requests.values())
        for request in requests:
            request.note_finished_output(0, FinishReason.LENGTH)
        times = []
        for request in requests:
            begin_ns = time.thread_time_ns()
            ended = request.summary(0.0)
            side.meter.request_ended(ended)
            log_end(ended)
            times.append((time.thread_time_ns() - begin_ns) / 1000)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
    assert len(stream.getvalue().splitlines()) == len(requests)
    return float(np.percentile(times, QUIET_PERCENTILE))


def measure_scrape(num_sequences: int) -> float:
    """Return the CPU microseconds of collecting the metrics on the event loop, with one executor."""
    idle = IdleEngine(["127.0.0.1:50061"], limits_for(num_sequences, num_sequences, 1, budget=num_sequences))
    times = []
    for _ in range(NUM_WARM_UP_STEPS):
        begin_ns = time.thread_time_ns()
        assert len(list(scheduler_families(idle.engine))) > len(METRICS) // 2
        times.append((time.thread_time_ns() - begin_ns) / 1000)
    return float(np.percentile(times, QUIET_PERCENTILE))


def cost_table(costs: list[Cost]) -> Table:
    table = Table(title=f"Metrics and log lines, CPU µs; requests of {TOKENS_PER_REQUEST} tokens")
    for heading in (
        "sequences",
        "step without",
        "step with",
        "end of a request",
        "added to a step",
        "step in service",
        "share",
        "scrape",
    ):
        table.add_column(heading, justify="right")
    for cost in costs:
        figures = (cost.without_us, cost.with_us, cost.end_us, cost.added_us, cost.service_us)
        shown = [f"{figure:,.1f}" for figure in figures]
        table.add_row(str(cost.num_sequences), *shown, f"{cost.share:.2%}", f"{cost.scrape_us:,.0f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="CPU time of metrics and log lines in the scheduler.")
    parser.add_argument("--sequences", default=",".join(map(str, NUM_SEQUENCES)), help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="measured steps (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    arguments = parser.parse_args()
    costs = [measure(int(num_sequences), arguments.steps) for num_sequences in arguments.sequences.split(",")]
    console = Console()
    console.print(cost_table(costs))
    console.print(describe_machine())
    if arguments.json is not None:
        figures = {"machine": describe_machine(), "costs": [dataclasses.asdict(cost) for cost in costs]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

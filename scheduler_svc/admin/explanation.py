"""Why a request waits, in a sentence or two and in numbers: `ExplainRequest` and `ListQueue` of `AdminService`.

Every planner is asked what it would do with the request now, so the reasons are those of the next decision.
Nothing here changes the engine.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.values.wording import counted
from scheduler_svc.admin.life import ended_state, milliseconds
from scheduler_svc.admin.state import RequestLocation, RequestLocations, num_output_tokens
from scheduler_svc.core.sequence import Placed, SequenceGroup
from scheduler_svc.core.step.demand import Demand, Obstacle, Wait
from scheduler_svc.core.step.executor_planner import DRAINING, ExecutorPlanner
from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.request.life import EndedRequest

MAX_EXECUTORS_IN_TEXT = 3
MAX_JUDGED_AHEAD = 200

FITS = "fits, and waits for token budget in a step"
FITS_BEHIND = "will fit once the requests ahead of it are admitted"
SAVES_NO_STATES = "the executor saves no states of this model, so no prefix is found again"


def explain(engine: Engine, request: LiveRequest, now_s: float) -> pb.ExplainRequestResponse:
    """Say why a live request waits, or that it runs; `now_s` is the monotonic time."""
    location = RequestLocations(engine).of(request)
    planner, group = location.planner, request.group
    explained = pb.ExplainRequestResponse(status=location.status, executor=location.executor)
    if location.status == admin_pb2.REQUEST_STATUS_PARKED:
        explained.explanation = parked_text(request, engine.requests.suspects.current)
    elif planner is None and group in engine.queue:
        _explain_waiting(engine, request, now_s, explained)
    elif planner is None:
        explained.explanation = "waits" if engine.weights.mode else "is about to finish"
    elif location.status == admin_pb2.REQUEST_STATUS_SWAPPED:
        _explain_swapped(planner, group, explained)
    elif location.status == admin_pb2.REQUEST_STATUS_PREEMPTED:
        explained.explanation = (
            f"preempted on {location.executor}: {tokens_in_flight_text(group)}; then it goes back to the queue"
        )
    else:
        explained.explanation = running_text(request, location)
        if group.placed is not None and len(engine.fleet.planners) > 1:
            explained.explanation += f"; {placed_text(group.placed)}"
    if planner is not None and planner.is_draining:
        explained.explanation += f"; {DRAINING}: it moves to another executor once one has capacity"
    if planner is not None and planner.limits.has_states and not planner.limits.num_state_blocks:
        explained.explanation += f"; {SAVES_NO_STATES}"
    if text := encoder_text(group):
        explained.explanation += f"; {text}"
    if why_paused := engine.weights.why_paused:
        explained.explanation += f"; {why_paused}"
    if location.planner is not None and (trouble := _troubles(engine, now_s).get(location.planner)):
        explained.explanation += f"; on its executor {trouble}"
    return explained


def explain_ended(ended: EndedRequest, now_s: float) -> pb.ExplainRequestResponse:
    """Say how a request ended, and how long ago; `now_s` is the monotonic time. GetRequest has the other times."""
    state = ended_state(ended, now_s, shows_events=False)
    end = "failed after" if ended.has_failed else "finished with"
    made = counted(state.num_output_tokens, "output token")
    explanation = f"{duration_text(state.ended_ago_ms)} ago it {end} {made}: {state.outcome}"
    return pb.ExplainRequestResponse(status=admin_pb2.REQUEST_STATUS_ENDED, explanation=explanation)


def queued_requests(engine: Engine, now_s: float) -> Iterator[admin_pb2.QueuedRequest]:
    """Yield the waiting queue in the order of admission, with reasons.

    Groups that wait only for what is sure to end let later groups be judged. The first other group gives its
    reason to all groups behind it, which are not judged: judging all would cost as much as admitting all.
    """
    first_in_line: SequenceGroup | None = None
    for num_ahead, group in enumerate(engine.queue.in_order()):
        if first_in_line is not None:
            reason = f"queued behind {first_in_line.request_id!r}"
        else:
            obstacles = engine.fleet.obstacles(group, now_s)
            fits = _fits(engine, group, obstacles, now_s)
            texts = obstacle_texts(fits, FITS, unit_texts(group, obstacles))
            reason = "; ".join(texts) or no_executor_text(engine)
            if not _lets_others_pass([obstacle for _, obstacle in obstacles]):
                first_in_line = group
        yield admin_pb2.QueuedRequest(
            num_requests_ahead=num_ahead,
            request_id=group.request_id,
            tenant=group.tenant,
            priority=group.priority,
            num_prompt_tokens=group.num_prompt_tokens,
            has_run=group.has_run,
            age_ms=milliseconds(now_s - engine.requests.of(group).times.arrived_at_s),
            reason=reason,
        )


def _lets_others_pass(obstacles: Sequence[Obstacle | None]) -> bool:
    """Return whether the groups behind a group with these obstacles, one for each planner, are judged all the same."""
    waits = {obstacle.wait for obstacle in obstacles if obstacle is not None}
    return None not in obstacles and (Wait.SKIPPED in waits or waits == {Wait.NEVER})


# In numbers --------------------------------------------------------------------------------------


def _explain_waiting(engine: Engine, request: LiveRequest, now_s: float, explained: pb.ExplainRequestResponse) -> None:
    group = request.group
    num_ahead = engine.queue.num_ahead_of(group)
    obstacles = engine.fleet.obstacles(group, now_s)
    fits = _fits(engine, group, obstacles, now_s)
    explained.num_requests_ahead = num_ahead
    explained.executors.extend(fits)
    texts = obstacle_texts(fits, FITS_BEHIND) if num_ahead else obstacle_texts(fits, FITS, unit_texts(group, obstacles))
    reasons = texts or [no_executor_text(engine)]
    waits = "waits to resume" if group.has_run else "waits"
    if (left_s := engine.orphans.left_s(request, now_s)) is not None:
        reasons.append(
            f"it fails in {left_s:.0f} s unless an executor that can hold it is attached (--orphan-timeout-s)"
        )
    ahead = ahead_text(num_ahead, _overtaking_texts(engine, group, num_ahead))
    explained.explanation = f"{waits}: {'; '.join([ahead, *reasons])}"


def _explain_swapped(planner: ExecutorPlanner, group: SequenceGroup, explained: pb.ExplainRequestResponse) -> None:
    num_ahead = planner.swapped.groups.index(group)
    fit = _swap_in_fit(planner, group, explained.executor)
    explained.num_requests_ahead = num_ahead
    explained.executors.append(fit)
    reasons = [fit.obstacle or (FITS_BEHIND if num_ahead else FITS)]
    if num_ahead:
        reasons.insert(0, ahead_text(num_ahead))
    explained.explanation = f"swapped out of {explained.executor}: {'; '.join(reasons)}"


def _fits(
    engine: Engine, group: SequenceGroup, obstacles: Sequence[tuple[ExecutorPlanner, Obstacle | None]], now_s: float
) -> list[admin_pb2.ExecutorFit]:
    """Return what a waiting group needs of each planner, and what is available."""
    addresses = {driver.planner: driver.address for driver in engine.drivers.values()}
    troubles = _troubles(engine, now_s)
    fits = []
    for planner, obstacle in obstacles:
        demand = None if group.pooling is not None else planner.admissions.demand_of(group, group.requires)
        reasons = [] if obstacle is None else [obstacle.reason]
        if planner in troubles and not reasons:
            reasons.append(troubles[planner])
        fits.append(_fit_of(planner, addresses.get(planner, ""), "; ".join(reasons), demand))
    return fits


def _overtaking_texts(engine: Engine, group: SequenceGroup, num_ahead: int) -> list[str]:
    """Say why groups that came later are admitted earlier than this one; nothing if very many are ahead."""
    if num_ahead > MAX_JUDGED_AHEAD:
        return []
    later = [other for other in islice(engine.queue.in_order(), num_ahead) if other.arrival > group.arrival]
    newcomers = [other for other in later if not (other.has_run and other.tenant == group.tenant)]
    num_urgent = sum(other.priority < group.priority for other in newcomers) if engine.settings.has_priorities else 0
    reasons = [
        (len(later) - len(newcomers), "ran before and resumes first", "ran before and resume first"),
        (num_urgent, *(f"{has} a higher priority than {group.priority}" for has in ("has", "have"))),
        (
            len(newcomers) - num_urgent,
            "belongs to a tenant with less service so far, relative to its weight",
            "belong to tenants with less service so far, relative to their weights",
        ),
    ]
    return [f"{number} came later and {one if number == 1 else several}" for number, one, several in reasons if number]


def _troubles(engine: Engine, now_s: float) -> dict[ExecutorPlanner, str]:
    """Return the troubles of attached executors, by planner."""
    drivers = engine.drivers.values()
    return {driver.planner: trouble for driver in drivers if driver.planner and (trouble := driver.trouble(now_s))}


def _swap_in_fit(planner: ExecutorPlanner, group: SequenceGroup, executor: str) -> admin_pb2.ExecutorFit:
    """Return what the swap-in of a group needs, and what prevents it."""
    admissions = planner.admissions
    demand = admissions.demand_to_swap_in(group)
    obstacle = admissions.obstacle_to_swap_in(demand)
    reason = tokens_in_flight_text(group) if group.has_inflight_rows else "" if obstacle is None else obstacle.reason
    return _fit_of(planner, executor, reason, demand)


def _fit_of(planner: ExecutorPlanner, executor: str, reason: str, demand: Demand | None) -> admin_pb2.ExecutorFit:
    """Return what a group needs of a planner, and what is available; demand None: a text, which needs no blocks."""
    return admin_pb2.ExecutorFit(
        executor=executor,
        obstacle=reason,
        num_needed_blocks=0 if demand is None else demand.blocks.num_needed,
        num_free_blocks=planner.blocks.allocator.num_free_blocks if demand is None else demand.blocks.num_free,
        num_needed_slots=0 if demand is None else demand.requires.num_slots,
        num_free_slots=planner.batch.num_free_slots,
    )


# In words ----------------------------------------------------------------------------------------


def ahead_text(num_ahead: int, overtaking: Sequence[str] = ()) -> str:
    """Say how many requests are ahead, and why those that came later are."""
    if not num_ahead:
        return "next in the queue"
    number = f"{counted(num_ahead, 'request')} ahead"
    return f"{number} ({'; '.join(overtaking)})" if overtaking else number


def obstacle_texts(fits: Sequence[admin_pb2.ExecutorFit], text_if_none: str, behind: Sequence[str] = ()) -> list[str]:
    """Say what prevents admission on each of the first executors, and how many more executors there are.

    `behind`: what `text_if_none` goes on with, for each executor; empty: nothing for any.
    """
    texts = [
        f"on {fit.executor}, {fit.obstacle or text_if_none + more}"
        for fit, more in zip(fits[:MAX_EXECUTORS_IN_TEXT], behind or [""] * len(fits), strict=False)
    ]
    num_more = len(fits) - len(texts)
    return [*texts, f"{counted(num_more, 'more executor')}"] if num_more else texts


def unit_texts(group: SequenceGroup, obstacles: Sequence[tuple[ExecutorPlanner, Obstacle | None]]) -> list[str]:
    """Say how a step that admits a group gets the input of its encoder, for each planner; empty: there is none."""
    if group.encoder_token_ids is None:
        return []
    return ["" if obstacle else _unit_text(planner, group) for planner, obstacle in obstacles]


def _unit_text(planner: ExecutorPlanner, group: SequenceGroup) -> str:
    plan = planner.blocks.plan_encoder(group)
    if plan is None or not plan.num_tokens_to_encode:
        return "; its encoder's input is there already"
    text = f" with room for {counted(plan.num_tokens_to_encode, 'encoder token')}: an input is encoded whole"
    return f"{text}; the next step is for such inputs alone" if planner.admissions.unit_needs_step else text


def encoder_text(group: SequenceGroup) -> str:
    """Say what a group attends to besides itself; empty: nothing."""
    if group.encoder_token_ids is None:
        return ""
    text = f"its encoder reads {counted(len(group.encoder_token_ids), 'token')}"
    if not group.has_run:
        return text
    return f"{text}, {'found as another request had them encoded' if group.has_found_input else 'encoded for it'}"


def no_executor_text(engine: Engine) -> str:
    """Say that no executor can take a request, and why."""
    cause = f" ({engine.last_trouble})" if engine.last_trouble else ""
    return f"no executor is attached{cause}"


def tokens_in_flight_text(group: SequenceGroup) -> str:
    """Say what a preempted group waits for."""
    num_in_flight = sum(sequence.num_inflight_rows for sequence in group.live_sequences)
    verb = "is" if num_in_flight == 1 else "are"
    return f"{counted(num_in_flight, 'token')} {verb} still in flight"


def parked_text(request: LiveRequest, suspect: LiveRequest | None) -> str:
    """Say that a request is suspected, and which request it waits for."""
    lost = counted(request.num_losses, "time")
    other = f"{suspect.request_id!r}, also quarantined, is" if suspect is not None else "others are"
    return f"quarantined: it may have crashed an executor {lost}; {other} run alone first"


def placed_text(placed: Placed) -> str:
    """Say why a request was placed on its executor."""
    own, cached = counted(placed.num_tokens, "token"), counted(placed.num_cached_tokens, "token")
    beside = counted(placed.num_rows, "sequence")
    text = (
        f"placed there at the lowest cost, {placed.cost} tokens: {own} to compute, {cached} cached, {beside} already "
        "there"
    )
    return f"{text}; on {placed.other} it would cost {placed.other_cost}" if placed.other else text


def running_text(request: LiveRequest, location: RequestLocation) -> str:
    """Say how far a running request has come."""
    group, planner = request.group, location.planner
    assert planner is not None, "a running request has a planner"
    if group.pooling is not None:
        return f"runs on {location.executor}: a step computes all its {counted(group.num_prompt_tokens, 'token')}"
    if planner.prefills.is_running(group):
        slots = [slot for _, slot in planner.beam_batch.source_slots(group)]
        num_computed, num_known = (
            int(column[slots].sum()) for column in (planner.batch.num_computed_tokens, planner.table.num_known_tokens)
        )
        return f"runs on {location.executor}: {num_computed} of {num_known} tokens computed"
    made = counted(num_output_tokens(request), "output token")
    if group.beam_search is not None:
        kind = f"a beam search of width {group.beam_search.beam_width}, {made} in its live beams"
    elif len(group.sequences) > 1:
        kind = f"{made} in {len(group.sequences)} outputs, {len(group.live_sequences)} of them live"
    else:
        kind = f"{made} so far"
    return f"runs on {location.executor}: {kind}"


def duration_text(milliseconds: int) -> str:
    """Return a span of time, such as "0.042 s", "12.3 s" or "3 min 5 s"."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{milliseconds // 60_000:,} min {milliseconds // 1000 % 60} s"

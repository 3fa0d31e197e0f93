"""The upper part of the screen: the scheduler in four or five lines, and its executors, a line each."""

from rich.cells import cell_len
from rich.text import Text

from octavo.admin.v1 import admin_pb2
from octavo.admin.v1 import admin_service_pb2 as pb
from octavo.top.formatting import (
    NONE,
    bar_lengths,
    count_text,
    fit,
    fit_id,
    pad,
    rate_text,
    share_text,
    short_span_text,
    span_text,
    sparkline,
)
from octavo.top.rates import Picture, Rates, attached_models
from octavo.values.wording import counted, printable

# Shared, used, cached, free: told apart by their shape also where there are no colours.
BLOCK_CELLS = (("█", "#5fafd7"), ("▓", "#5f87af"), ("░", "#5f87af"), ("·", "dim"))
_LABEL_WIDTH = 12
_MAX_SPARKLINE = 60
_WIDE = 100  # cells; there is room for a status in front of the numbers
_WIDEST = 120  # and for what is known of the link


def overview_lines(picture: Picture, address: str, width: int) -> list[Text]:
    """Return what the scheduler is and does, four lines of at most `width` cells; a fifth one where drafts are made."""
    state, rates = picture.answers.state, picture.rates
    preemptions = f"{rate_text(rates.preemptions)} preemptions"
    refusals = [f"{rate_text(rates.refused_requests)} refused"] if state.num_refused_requests else []
    if width >= _WIDE:
        preemptions += f" ({count_text(state.num_preemptions)} in all)"
    lines = [
        _identity_line(picture, address, width),
        _tokens_line(picture, width),
        _labelled("requests", *_request_counts(state, is_wide=width >= _WIDE)),
        _labelled(
            "per second",
            f"{rate_text(rates.finished_requests)} finished",
            f"{rate_text(rates.failed_requests)} failed",
            *refusals,
            preemptions,
            _cache_hits_text(state),
        ),
    ]
    if any(executor.num_draft_tokens for executor in state.executors):
        lines.append(_drafts_line(rates))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _cache_hits_text(state: pb.GetSchedulerStateResponse) -> str:
    if any(executor.has_states and not executor.num_state_blocks for executor in state.executors):
        return "no cache hits: no states are saved"
    hits = f"cache hits {share_text(state.num_hit_tokens, state.num_queried_tokens)}"
    places = (state.num_host_hit_tokens, "from the host"), (state.num_pulled_hit_tokens, "pulled")
    if moved := [f"{share_text(num, state.num_queried_tokens)} {where}" for num, where in places if num]:
        hits += f" ({', '.join(moved)})"
    num_blocks = sum(executor.num_state_blocks for executor in state.executors)
    num_saved = sum(executor.num_saved_states for executor in state.executors)
    if num_blocks:
        hits += f", {num_saved} of {num_blocks} states saved"
    num_blocks = sum(executor.num_encoder_blocks for executor in state.executors)
    num_used = sum(executor.num_used_encoder_blocks for executor in state.executors)
    return f"{hits}, {num_used} of {num_blocks} encoder blocks used" if num_blocks else hits


def executor_lines(picture: Picture, width: int, max_lines: int) -> list[Text]:
    """Return a head and a line for each executor, the ones that are not attached first.

    At most `max_lines`; the last of them counts what is left out.
    """
    executors = sorted(picture.answers.state.executors, key=is_attached)
    addresses = [printable(executor.address) for executor in executors]
    address_width = max([21, *(min(len(address), 30 if width < _WIDE else 40) for address in addresses)])
    status_width = 8 if width >= _WIDE else 0
    num_shown = len(executors) if len(executors) < max_lines else max(0, max_lines - 2)
    lines = [_executor_head(width, address_width, status_width)]
    for executor, address in zip(executors[:num_shown], addresses, strict=False):
        line = Text(pad(fit_id(address, address_width), address_width))
        if is_attached(executor):
            rate = picture.rates.executor_output_tokens.get(executor.address)
            _add_attached(line, executor, rate, width, status_width)
        else:
            trouble, losses = printable(executor.last_error), ""
            if executor.num_losses:
                losses = f" (lost {counted(executor.num_losses, 'time')})"
            line.append(f" {executor_status(executor)}", "yellow")
            line.append(f"{losses}: {trouble}" if trouble else f" yet{losses}")
        lines.append(line)
    if num_shown < len(executors):
        num_attached = sum(map(is_attached, executors[num_shown:]))
        rest = f"{counted(len(executors) - num_shown, 'more executor')}, {num_attached} of them attached"
        lines.append(Text(rest, "dim"))
    if not executors:
        lines.append(Text("no executor found: no address in the scheduler's --executor responds", "yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def is_attached(executor: admin_pb2.ExecutorState) -> bool:
    """Return whether an executor takes steps."""
    return executor.status == admin_pb2.EXECUTOR_STATUS_ATTACHED


def executor_status(executor: admin_pb2.ExecutorState) -> str:
    """Return the state of an executor in words; of a scheduler that does not say it, whether it is attached."""
    return printable(executor.status_text) or ("attached" if is_attached(executor) else "not attached")


def legend() -> Text:
    """Return what the shapes of a bar mean."""
    names = ("shared", "used", "cached", "free")
    parts = [
        Text.assemble((cell * 2, style), f" {name}") for (cell, style), name in zip(BLOCK_CELLS, names, strict=True)
    ]
    return Text("   ").join(parts)


def block_bar(executor: admin_pb2.ExecutorState, width: int) -> Text:
    """Return the blocks of an executor as a bar of so many cells."""
    num_shared, num_cached = executor.num_shared_blocks, executor.num_cached_blocks
    parts = (num_shared, executor.num_used_blocks - num_shared, num_cached, executor.num_free_blocks - num_cached)
    bar = Text()
    for length, (cell, style) in zip(bar_lengths(parts, width), BLOCK_CELLS, strict=True):
        bar.append(cell * length, style)
    return bar


def _identity_line(picture: Picture, address: str, width: int) -> Text:
    state = picture.answers.state
    attached = [executor for executor in state.executors if is_attached(executor)]
    models = [printable(model_id) for model_id in picture.model_ids or attached_models(picture.answers)]
    readiness = printable(state.status_text) or ("draining" if state.is_draining else "")
    style = "#87af5f" if readiness == "ready" else "yellow" if state.is_draining else "red"
    line = Text.assemble(
        (f"octavo {printable(state.version)}", "bold"),
        "   ",
        (fit(", ".join(models) or "no model yet", 40), "bold"),
        "   ",
        (fit(readiness, 60), style) if readiness else "",
        f"   up {span_text(state.uptime_ms)}   {len(attached)} of {counted(len(state.executors), 'executor')}",
    )
    if state.has_mixed_numerics:
        line.append("   several numerics ids", "yellow")
    if state.step_log_trouble:
        line.append("   step log stopped", "yellow")
    room = width - line.cell_len - 3
    if room >= len(address):
        line.append(address.rjust(width - line.cell_len), "dim")
    return line


def _tokens_line(picture: Picture, width: int) -> Text:
    rates = picture.rates
    parts = (
        ("in", rates.prompt_tokens, picture.prompt_history, "#5fafd7"),
        ("out", rates.output_tokens, picture.output_history, "#87af5f"),
    )
    for_sparkline = min(
        _MAX_SPARKLINE, (width - _LABEL_WIDTH - sum(len(name) + 11 for name, *_ in parts)) // len(parts)
    )
    line = _labelled("tokens/s")
    for name, rate, history, style in parts:
        line.append(f"{name} {rate_text(rate):>7} ")
        if len(history) > 1:
            line.append(sparkline(history, for_sparkline), style)
        line.append("   ")
    line.rstrip()
    return line


def _drafts_line(rates: Rates) -> Text:
    num_tokens = sum(rates.executor_output_tokens.values())
    num_rows = num_tokens - (rates.accepted_drafts or 0)  # each brought one token and its right drafts
    return _labelled(
        "drafts",
        f"{rate_text(rates.accepted_drafts)} of {rate_text(rates.drafts)} right per second",
        f"{f'{num_tokens / num_rows:.1f}' if num_rows > 0 else NONE} tokens a step of a sequence",
    )


def _request_counts(state: pb.GetSchedulerStateResponse, *, is_wide: bool) -> list[str]:
    limit = f" of {'at most ' if is_wide else ''}{count_text(state.max_waiting_requests)}"
    parked = f" ({count_text(state.num_parked_requests)} quarantined)" if state.num_parked_requests else ""
    return [
        f"{count_text(state.num_waiting_requests)}{limit if state.max_waiting_requests else ''} waiting{parked}",
        f"{count_text(state.num_running_requests)} running",
        f"{count_text(state.num_swapped_requests)} swapped",
        f"{count_text(state.num_preempted_requests)} preempted",
        *(
            [f"{sum(front.is_ready for front in state.fronts)} of {counted(len(state.fronts), 'front')}"]
            if state.fronts
            else []
        ),
    ]


def _labelled(label: str, *parts: str) -> Text:
    return Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), "   ".join(parts))


def _executor_head(width: int, address_width: int, status_width: int) -> Text:
    status = f" {'STATUS':<{status_width}}" if status_width else ""
    running = f" {'RUN':>4}" if status_width else ""
    link = f" {'RTT':>7} {'WASTE':>5}" if width >= _WIDEST else ""
    return Text(
        f"{'EXECUTOR':<{address_width}}{status}{running} {'SLOTS':>9} {'SWAP':>4} {'STEPS':>11}{link} {'TOK/S':>6}"
        f" {'LOST':>4}  BLOCKS",
        "bold",
    )


def _add_attached(
    line: Text, executor: admin_pb2.ExecutorState, tokens_per_s: float | None, width: int, status_width: int
) -> None:
    """Add to an executor's address what it does, or what is wrong with it."""
    if status_width:
        status = executor_status(executor)
        line.append(f" {status:<{status_width}}", "#87af5f" if status == "attached" else "yellow")
        line.append(f" {count_text(executor.num_running_requests):>4}")
    slots = f"{executor.num_slots - executor.num_free_slots}/{executor.num_slots}" if executor.num_slots else NONE
    line.append(f" {slots:>9} {count_text(executor.num_swapped_requests):>4}")
    steps = str(executor.num_steps_in_flight)
    if executor.max_steps_in_flight:
        steps += f"/{executor.max_steps_in_flight}"
    if executor.HasField("oldest_step_age_ms"):
        steps += f", {span_text(executor.oldest_step_age_ms)}"
    link = ""
    if width >= _WIDEST:
        trip = short_span_text(executor.round_trip_us) if executor.HasField("round_trip_us") else NONE
        num_void = executor.num_void_rows
        link = f" {trip:>7} {share_text(num_void, num_void + executor.num_output_tokens):>5}"
    numbers = f" {steps:>11}{link} {rate_text(tokens_per_s):>6} {count_text(executor.num_losses):>4}"
    if warning := printable(executor.warning):  # in place of the blocks, and maybe of the numbers before them
        if line.cell_len + len(numbers) + 2 + cell_len(warning) <= width:
            line.append(numbers)
        line.append(f"  {warning}", "yellow")
        return
    line.append(f"{numbers}  ")
    share = f" {share_text(executor.num_used_blocks, executor.num_blocks):>5} of {count_text(executor.num_blocks)}"
    line.append_text(block_bar(executor, max(0, min(60, width - line.cell_len - len(share)))))
    line.append(share)

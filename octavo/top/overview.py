"""The upper part of the screen: the scheduler in four lines, and its executors, a line each."""

from collections.abc import Sequence

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
from octavo.top.rates import Picture, attached_models
from octavo.top.rows import ExecutorRow
from octavo.values.wording import counted, printable

# Shared, used by one sequence, cached, free: told apart by their shape also where there are no colours.
BLOCK_CELLS = (("█", "#5fafd7"), ("▓", "#5f87af"), ("░", "#5f87af"), ("·", "dim"))
_LABEL_WIDTH = 12
_MAX_SPARKLINE = 60
_WIDE = 100  # cells; there is room for a status in front of the numbers
_WIDEST = 120  # and for what is known of the link


def overview_lines(picture: Picture, address: str, width: int) -> list[Text]:
    """Return what the scheduler is and does, four lines of at most `width` cells."""
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
            f"cache hits {share_text(state.num_hit_tokens, state.num_queried_tokens)}",
        ),
    ]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def executor_lines(rows: Sequence[ExecutorRow], width: int, max_lines: int) -> list[Text]:
    """Return a head and a line for each executor; at most `max_lines`, the last of which counts what is left out."""
    address_width = max([21, *(min(len(row.address), 30 if width < _WIDE else 40) for row in rows)])
    status_width = 8 if width >= _WIDE else 0
    num_shown = len(rows) if len(rows) < max_lines else max(0, max_lines - 2)
    lines = [_executor_head(width, address_width, status_width)]
    lines += [_executor_line(row, width, address_width, status_width) for row in rows[:num_shown]]
    if num_shown < len(rows):
        num_attached = sum(row.is_attached for row in rows[num_shown:])
        rest = f"{counted(len(rows) - num_shown, 'more executor')}, {num_attached} of them attached"
        lines.append(Text(rest, "dim"))
    if not rows:
        lines.append(Text("no executor found: no address in the scheduler's --executor responds", "yellow"))
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def legend() -> Text:
    """Return what the shapes of a bar mean."""
    names = ("shared", "used by one", "cached", "free")
    parts = [
        Text.assemble((cell * 2, style), f" {name}") for (cell, style), name in zip(BLOCK_CELLS, names, strict=True)
    ]
    return Text("   ").join(parts)


def block_bar(row: ExecutorRow, width: int) -> Text:
    """Return the blocks of an executor as a bar of so many cells."""
    parts = (row.num_shared_blocks, row.num_used_blocks, row.num_cached_blocks, row.num_free_blocks)
    bar = Text()
    for length, (cell, style) in zip(bar_lengths(parts, width), BLOCK_CELLS, strict=True):
        bar.append(cell * length, style)
    return bar


def _identity_line(picture: Picture, address: str, width: int) -> Text:
    state = picture.answers.state
    attached = [e for e in state.executors if e.status == admin_pb2.EXECUTOR_STATUS_ATTACHED]
    models = [printable(model_id) for model_id in picture.model_ids or attached_models(picture.answers)]
    if state.is_draining:
        readiness = ("draining, accepts no new requests", "yellow")
    elif attached:
        readiness = ("ready", "#87af5f")
    else:
        readiness = ("not ready: no executor is attached", "red")
    line = Text.assemble(
        (f"octavo {printable(state.version)}", "bold"),
        "   ",
        (fit(", ".join(models) or "no model yet", 40), "bold"),
        "   ",
        readiness,
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


def _executor_line(row: ExecutorRow, width: int, address_width: int, status_width: int) -> Text:
    line = Text(pad(fit_id(row.address, address_width), address_width))
    if not row.is_attached:
        line.append(f" {row.status}", "yellow")
        losses = f" (lost {counted(row.num_losses, 'time')})" if row.num_losses else ""
        line.append(f"{losses}: {row.trouble}" if row.trouble else f" yet{losses}")
        return line
    if status_width:
        line.append(f" {row.status:<{status_width}}", "#87af5f" if row.status == "attached" else "yellow")
        line.append(f" {count_text(row.num_running):>4}")
    slots = f"{row.num_used_slots}/{row.num_slots}" if row.num_slots else NONE
    line.append(f" {slots:>9} {count_text(row.num_swapped):>4}")
    steps = str(row.num_steps_in_flight)
    if row.max_steps_in_flight:
        steps += f"/{row.max_steps_in_flight}"
    if row.oldest_step_ms is not None:
        steps += f", {span_text(row.oldest_step_ms)}"
    link = ""
    if width >= _WIDEST:
        trip = NONE if row.round_trip_us is None else short_span_text(row.round_trip_us)
        link = f" {trip:>7} {share_text(row.num_void_rows, row.num_void_rows + row.num_output_tokens):>5}"
    numbers = f" {steps:>11}{link} {rate_text(row.tokens_per_s):>6} {count_text(row.num_losses):>4}"
    if row.warning:  # in place of the blocks, and where it needs more room also of the numbers before them
        if line.cell_len + len(numbers) + 2 + cell_len(row.warning) <= width:
            line.append(numbers)
        line.append(f"  {row.warning}", "yellow")
        return line
    line.append(f"{numbers}  ")
    share = f" {share_text(row.num_taken_blocks, row.num_blocks):>5} of {count_text(row.num_blocks)}"
    line.append_text(block_bar(row, max(0, min(60, width - line.cell_len - len(share)))))
    line.append(share)
    return line

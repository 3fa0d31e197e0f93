"""One request for people: where it is, what is in its way, what it used, and its life."""

import re
from collections.abc import Sequence

from rich.text import Text

from octavo.admin.v1 import admin_pb2
from octavo.top.formatting import span_text, time_text
from octavo.top.report import Report, Sharing
from octavo.top.rows import STATUS_STYLES, status_text
from octavo.values.wording import counted, printable

_MAX_NAMED = 3
_LABEL_WIDTH = 10


def report_lines(report: Report) -> list[Text]:
    """Return all of a report, a line each; lines may be longer than a terminal is wide."""
    lines = [heading(report), explanation_line(report)]
    if report.explanation.executors:
        lines += [Text(), *_fit_lines(report.explanation.executors)]
    lines += _warning_lines(report)
    lines += [Text(), *_number_lines(report)]
    if report.request.events:
        lines += [Text(), *event_lines(report.request.events)]
    if report.url is not None:
        lines += [Text(), _labelled("live page", report.url)]
    return lines


def heading(report: Report) -> Text:
    """Return which request it is, where it is, and for which tenant it runs."""
    request = report.request
    word = status_text(request)
    line = Text.assemble((printable(request.request_id), "bold"), "   ", (word, STATUS_STYLES.get(word, "")))
    if report.explanation.executor:
        line.append(f" on {printable(report.explanation.executor)}")
    if request.tenant:
        line.append(f"   tenant {printable(request.tenant)}")
    if request.priority:
        line.append(f"   priority {request.priority}")
    return line


def explanation_line(report: Report) -> Text:
    """Return why it waits, that it runs, or how it ended, as the scheduler says it."""
    return Text(printable(report.explanation.explanation))


def event_lines(events: Sequence[admin_pb2.RequestEvent], num_known: int = 0) -> list[Text]:
    """Return what happened, oldest first: when since the arrival, how long after the event before, what, and where.

    Args:
        events: Of the whole life.
        num_known: So many of the first ones are left out.
    """
    lines = []
    for i, event in enumerate(events):
        if i < num_known:
            continue
        line = Text(f"{_exact_text(event.since_arrival_us):>11}")
        after = event.since_arrival_us - events[i - 1].since_arrival_us if i else None
        line.append(f"  {'' if after is None else f'+{_exact_text(after)}':>12}  ", "dim")
        line.append(printable(event.text))
        where = [printable(event.executor)] if event.executor else []
        if event.HasField("step_id"):
            where.append(f"step {event.step_id:,}")
        if where:
            line.append(f"  ({', '.join(where)})", "dim")
        lines.append(line)
    return lines


def _fit_lines(fits: Sequence[admin_pb2.ExecutorFit]) -> list[Text]:
    """Return what it takes of each executor, what is there, and what is in the way."""
    cells = [("executor", "blocks", "slots", "blocked by")]
    cells += [
        (
            printable(fit.executor),
            f"{fit.num_needed_blocks:,} needed, {fit.num_free_blocks:,} free",
            f"{fit.num_needed_slots:,} needed, {fit.num_free_slots:,} free",
            printable(fit.obstacle) or "nothing",
        )
        for fit in fits
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    texts = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[3]]) for row in cells]
    return [Text(text, "dim" if i == 0 else "") for i, text in enumerate(texts)]


def _warning_lines(report: Report) -> list[Text]:
    """Return what is wrong with executors that concern the request, unless the scheduler has said it already."""
    said = _without_numbers(
        " ".join((report.explanation.explanation, *(f.obstacle for f in report.explanation.executors)))
    )
    return [
        Text(f"{printable(address)}: {printable(warning)}", "yellow")
        for address, warning in report.warnings.items()
        if _without_numbers(warning) not in said
    ]


def _without_numbers(text: str) -> str:
    """Return a text without what differs between two answers of one scheduler."""
    return re.sub(r"[\d.,]+", "#", text)


def _number_lines(report: Report) -> list[Text]:
    request = report.request
    tokens = [f"{request.num_prompt_tokens:,} prompt", f"{request.num_output_tokens:,} output"]
    if request.num_cached_tokens:
        tokens.append(f"{request.num_cached_tokens:,} of the prompt came from the prefix cache")
    if request.num_draft_tokens:
        tokens.append(f"{request.num_draft_tokens:,} of the output came as drafts")
    times = [f"took {span_text(request.age_ms)}" if report.has_ended else f"{span_text(request.age_ms)} old"]
    if request.HasField("queue_ms"):
        times.append(f"queued for {span_text(request.queue_ms)}")
    if request.HasField("time_to_first_token_ms"):
        times.append(f"first token after {span_text(request.time_to_first_token_ms)}")
    if request.HasField("last_token_age_ms"):
        times.append(f"last token {span_text(request.last_token_age_ms)} ago")
    if request.HasField("ended_at"):  # how long ago that was, the explanation says
        times.append(f"ended at {time_text(request.ended_at)}")
    lines = [_labelled("tokens", ", ".join(tokens)), _labelled("times", ", ".join(times))]
    if request.HasField("beam_search"):
        search = request.beam_search
        lines.append(_labelled("beams", f"width {search.beam_width}, complete hypotheses: {len(search.hypotheses)}"))
    elif len(request.sequences) > 1:
        lines.append(_labelled("outputs", str(len(request.sequences))))
    blocks = _block_texts(report)
    if blocks:
        lines.append(_labelled("blocks", ", ".join(blocks)))
    trouble = []
    if request.num_preemptions:
        trouble.append(f"preempted {counted(request.num_preemptions, 'time')}")
    if request.num_losses:
        since = "" if report.has_ended else " since its last token"
        trouble.append(f"executor lost {counted(request.num_losses, 'time')}{since}")
    if trouble:
        lines.append(_labelled("trouble", ", ".join(trouble)))
    return lines


def _block_texts(report: Report) -> list[str]:
    texts = []
    if report.device_blocks:
        texts.append(f"{len(report.device_blocks):,} on the device")
    if report.host_blocks:
        texts.append(f"{len(report.host_blocks):,} in the host cache")
    if report.sharing is not None and report.sharing.num_shared_blocks:
        texts.append(f"{report.sharing.num_shared_blocks:,} shared with {_sharers(report.sharing)}")
    return texts


def _sharers(sharing: Sharing) -> str:
    if not sharing.request_ids:
        return "its other outputs"
    names = ", ".join(printable(request_id) for request_id in sharing.request_ids[:_MAX_NAMED])
    num_more = len(sharing.request_ids) - _MAX_NAMED
    return f"{names} and {num_more:,} more" if num_more > 0 else names


def _labelled(label: str, text: str) -> Text:
    return Text.assemble((label.ljust(_LABEL_WIDTH), "dim"), text)


def _exact_text(microseconds: int) -> str:
    return f"{microseconds / 1e6:,.3f} s"

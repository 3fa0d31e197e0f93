"""One picture as plain text or as JSON, for pipes, scripts, and terminals that cannot draw."""

from dataclasses import asdict

from rich.text import Text

from octavo.top.as_json import to_values
from octavo.top.overview import executor_lines, is_attached, legend, overview_lines
from octavo.top.rates import Picture
from octavo.top.rows import Order, cell_texts, columns, head_texts, in_order, joined, live_rows
from octavo.values.wording import counted, json_line


def snapshot_text(picture: Picture, address: str, width: int) -> str:
    """Return a picture as lines of at most `width` cells (at least 80), the oldest requests first."""
    executors, rows = picture.answers.state.executors, in_order(live_rows(picture), Order.AGE)
    lines: list[Text | str] = [*overview_lines(picture, address, width), ""]
    lines += executor_lines(picture, width, max_lines=len(executors) + 2)
    if any(map(is_attached, executors)):
        lines.append(Text("blocks: ") + legend())
    lines += ["", requests_title(len(rows), picture.answers.num_live_requests)]
    if rows:
        chosen = columns(width, rows, shows_ended=False)
        lines.append(joined(head_texts(chosen, Order.AGE), width))
        lines += [joined(cell_texts(chosen, row), width) for row in rows]
    return "\n".join((line.plain if isinstance(line, Text) else line).rstrip() for line in lines)


def snapshot_json(picture: Picture, address: str) -> str:
    """Return a picture as one JSON object: the messages of AdminService, and the rates of this side.

    `reason` of a request is why it waits, as ListQueue says it; None: it is not at the head of the queue.
    """
    answers, rates = picture.answers, picture.rates
    requests = [
        {
            **to_values(request),
            "tokens_per_s": rates.request_output_tokens.get(request.request_id),
            "reason": answers.reasons.get(request.request_id),
        }
        for request in answers.live
    ]
    totals = {name: rate for name, rate in asdict(rates).items() if not name.startswith("request_")}
    shown = {
        "address": address,
        "state": to_values(answers.state),
        "rates_per_s": totals,
        "num_live_requests": answers.num_live_requests,
        "requests": requests,
    }
    return json_line(shown)


def requests_title(num_listed: int, num_live: int) -> str:
    """Say how many requests are listed, and of how many."""
    if num_listed == 0:
        return "no live requests"
    if num_listed < num_live:
        return f"the {num_listed:,} oldest of {counted(num_live, 'live request')}"
    return counted(num_listed, "live request")

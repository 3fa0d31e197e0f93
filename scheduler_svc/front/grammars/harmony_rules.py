"""The grammar of an output in OpenAI's harmony: thoughts, then a call or the answer, each a message.

A call or an answer ends with the token that ends the output, so no rule has that, and an output has one call at most.
"""

from scheduler_svc.front.grammars.parts import Part, lark_text
from scheduler_svc.front.grammars.tool_rules import Markers
from scheduler_svc.front.tool_calls.formats import HARMONY_MARKERS


def harmony_rules(markers: Markers, arguments: dict[str, str], response: Part | None, *, is_forced: bool) -> str:
    """Return the rules of an output, `start` first.

    Args:
        markers: Of the model.
        arguments: The name of the rule of each tool's arguments.
        response: What an answer follows, as `@response`; None: any text.
        is_forced: Whether the model must call a tool.
    """
    start, channel, constrain, message, *_ = map(markers.rule, HARMONY_MARKERS)
    until, rules = markers.text_until("until_end", HARMONY_MARKERS[4])
    # A text in front of an answer that follows something would be a part of it to the client.
    channels = '"analysis"' if response is not None else '("analysis" | "commentary")'
    answer = "TEXT" if response is None else "@response"
    kind = f'(/ ?/ ({constrain} / ?/)? "json")? / ?/ {message}'
    calls = []
    for name, rule in arguments.items():
        to = lark_text(f" to=functions.{name}")
        calls.append(f'({to} {channel} "commentary" | {channel} "commentary" {to}) {kind} {rule}')
    ends = calls if is_forced else [*calls, f'{channel} "final" {kind} {answer}']
    before = f'({channel} {channels} {message} {until} {start} "assistant")*'
    return f"start: {before} ({' | '.join(ends)})\n{rules}"

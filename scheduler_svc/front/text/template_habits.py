"""What a chat template wants of messages and tools that other templates do not, found by rendering small conversations.

arguments of calls   as a text; most want an object
reasoning            as `thinking`; most read `reasoning_content`
calls                one a message: others would be left out
content of a call    none beside reasoning: gpt-oss's template has one place for both
a tool               with a description
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# A tool that no template has built in, and a conversation with calls of it.
PROBE_NAME = "octavo_probe"
_SECOND_NAME = "octavo_second"
PROBE = {
    "type": "function",
    "function": {"name": PROBE_NAME, "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
HELLO = {"role": "user", "content": "Hello"}
_ARGUMENTS = {"octavo_key": "octavo_value"}
_TEXT = json.dumps(_ARGUMENTS)
_IDS = ("octavo123", "octavo456")  # nine letters and digits, as Mistral's templates require
_THOUGHT = "octavothought"
_CONTENT = "octavocontent"

# Between reasoning and content that become one text.
_BETWEEN = "\n\n"

Turn = Mapping[str, Any]


class TemplateHabits:
    """Adapts conversations to one template. Threads may share one.

    Args:
        render: Returns the prompt of messages and tools; empty: the template fails on them, or knows no tools.
    """

    def __init__(self, render: Callable[[Sequence[Turn], Sequence[Turn]], str]) -> None:
        def shown(*, arguments: object = _ARGUMENTS, names: Sequence[str] = (PROBE_NAME,), **fields: str) -> str:
            calls = [_call(name, arguments, call_id) for name, call_id in zip(names, _IDS, strict=False)]
            results = [{"role": "tool", "content": "result", "tool_call_id": call["id"]} for call in calls]
            turn = {"role": "assistant", "content": "", **fields, "tool_calls": calls}
            named = [{**result, "name": name} for result, name in zip(results, names, strict=True)]
            return render([HELLO, turn, *named], [PROBE])

        with_object, with_text = shown(), shown(arguments=_TEXT)
        self._wants_text_arguments = _TEXT in with_text and (not with_object or str(_ARGUMENTS) in with_object)
        reads = {name: _THOUGHT in shown(**{name: _THOUGHT}) for name in ("thinking", "reasoning_content")}
        self._reads_thinking = reads["thinking"] and not reads["reasoning_content"]
        self._folds = self._reads_thinking and _CONTENT not in shown(thinking=_THOUGHT, content=_CONTENT)
        both = shown(names=(PROBE_NAME, _SECOND_NAME))
        self._shows_one_call = bool(both) and _SECOND_NAME not in both
        bare = {"name": PROBE_NAME, "parameters": PROBE["function"]["parameters"]}  # type: ignore[index]
        self._needs_descriptions = bool(render([HELLO], [PROBE])) and not render(
            [HELLO], [{"type": "function", "function": bare}]
        )

    def messages(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """Return messages as the template wants them."""
        if self._reads_thinking:
            messages = [self._with_thinking(turn) for turn in messages]
        if self._shows_one_call:
            messages = list(_one_call_each(messages))
        if self._wants_text_arguments:
            messages = [_with_text_arguments(turn) for turn in messages]
        return messages

    def tools(self, tools: Sequence[Any]) -> Sequence[Any]:
        """Return tools as the template wants them."""
        return [_described(tool) for tool in tools] if self._needs_descriptions else tools

    def _with_thinking(self, turn: Turn) -> Turn:
        thinking = turn.get("reasoning_content")
        if not thinking:
            return turn
        if self._folds and turn.get("tool_calls") and turn["content"]:
            return {**turn, "thinking": f"{thinking}{_BETWEEN}{turn['content']}", "content": ""}
        return {**turn, "thinking": thinking}


def _call(name: str, arguments: object, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _one_call_each(messages: Sequence[Turn]) -> Iterator[Turn]:
    """Yield messages with one call each, and its results behind it; those with another id stay behind the last."""
    place = 0
    while place < len(messages):
        turn, calls, place = messages[place], messages[place].get("tool_calls"), place + 1
        if not isinstance(calls, Sequence) or len(calls) < 2:
            yield turn
            continue
        results: dict[object, list[Turn]] = {}
        ids = [str(call.get("id")) if isinstance(call, Mapping) else "" for call in calls]
        earlier = set(ids[:-1])
        while place < len(messages) and messages[place]["role"] == "tool":
            sent = messages[place].get("tool_call_id")
            results.setdefault(sent if sent in earlier else None, []).append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            said = turn if number == 0 else {"role": turn["role"], "content": ""}
            yield {**said, "tool_calls": [call]}
            is_last = number == len(calls) - 1
            yield from results.pop(None if is_last else ids[number], ())


def _with_text_arguments(turn: Turn) -> Turn:
    def text(arguments: object) -> object:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def written(function: Mapping[str, Any]) -> dict[str, Any]:
        return {**function, "arguments": text(function["arguments"])} if "arguments" in function else {**function}

    return {**turn, "tool_calls": changed_calls(turn["tool_calls"], written)} if turn.get("tool_calls") else turn


def changed_calls(calls: Sequence[Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[Any]:
    """Return tool calls with changed functions; values that are no calls stay as they are."""
    return [
        {**call, "function": change(call["function"])}
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
        else call
        for call in calls
    ]


def _described(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or function.get("description"):
        return tool
    return {**tool, "function": {**function, "description": ""}}

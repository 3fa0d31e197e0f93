"""The grammar of a chat's outputs: reasoning first, where the model has it, then calls of tools or the answer."""

from collections.abc import Sequence

from octavo_shared.step_wire.step import Int32Array
from scheduler_svc.front.grammars.harmony_rules import harmony_rules
from scheduler_svc.front.grammars.parts import AskedGrammar, Part, object_part, schema_part, whole
from scheduler_svc.front.grammars.tool_rules import COMMON, Markers, call_rules, check_format
from scheduler_svc.front.tool_calls.chat_format import ChatFormat
from scheduler_svc.front.tool_calls.tool_choice import RequestedTools


def check_chat_grammar(chat_format: ChatFormat, tools: RequestedTools | None) -> None:
    """Refuse what a model's format of calls cannot hold. Raises InvalidFieldError: naming the field."""
    if tools is not None and tools.holds is not None and chat_format.tool_calls is not None:
        check_format(chat_format.tool_calls, *tools.holds)


def chat_grammar(
    chat_format: ChatFormat,
    tools: RequestedTools | None,
    response: Part | None,
    prompt_token_ids: Sequence[int] | Int32Array,
) -> AskedGrammar:
    """Return the grammar of the outputs of one request; its tools, its response or both need one.

    Args:
        chat_format: How the model writes.
        tools: The request's tools.
        response: What an answer without calls follows; None: any text.
        prompt_token_ids: The request's prompt, which may open the reasoning.

    Raises: InvalidFieldError: a schema is too large.
    """
    markers = Markers(chat_format.tokenizer)
    if chat_format.is_harmony:
        return _harmony_grammar(tools, response, markers)
    thinking, rules = _thinking(chat_format, markers, prompt_token_ids)
    named: dict[str, Part] = {}
    if tools is None or tools.holds is None:
        assert response is not None, "something must hold"
        field = response.field
        if not thinking:
            return whole(response)
        named["response"] = response
        answer = "@response"
    else:
        field, _ = tools.holds
        answer, more = _tool_answer(chat_format, tools, markers, named, has_response=response is not None)
        rules += more
        if response is not None and not tools.forced:
            named["response"] = response
    return AskedGrammar(named, field, f"start: {thinking} {answer}\n{rules}{COMMON}")


def _harmony_grammar(tools: RequestedTools | None, response: Part | None, markers: Markers) -> AskedGrammar:
    named: dict[str, Part] = {}
    rule_of = {} if tools is None else _argument_rules(tools, named)
    is_forced = tools is not None and bool(tools.forced)
    holds = None if tools is None else tools.holds
    if response is not None and not is_forced:
        named["response"] = response
    field = holds[0] if holds is not None else named["response"].field
    return AskedGrammar(named, field, f"{harmony_rules(markers, rule_of, response, is_forced=is_forced)}{COMMON}")


def _thinking(
    chat_format: ChatFormat, markers: Markers, prompt_token_ids: Sequence[int] | Int32Array
) -> tuple[str, str]:
    """Return what matches the reasoning and the white space behind it, and its rules; empty: there is none."""
    reasoning = chat_format.reasoning
    if reasoning is None:
        return "", ""
    until, rules = markers.text_until("thoughts", reasoning.end)
    if chat_format.opens_reasoning(prompt_token_ids):
        return f"{until} ws", rules
    return f"(ws {markers.rule(reasoning.begin)} {until} ws)?", rules


def _tool_answer(
    chat_format: ChatFormat, tools: RequestedTools, markers: Markers, named: dict[str, Part], *, has_response: bool
) -> tuple[str, str]:
    """Return what matches an answer that may call tools, and its rules; the arguments become `named` parts."""
    tool_format = chat_format.tool_calls
    assert tool_format is not None, "tools were checked"
    rule_of = _argument_rules(tools, named)
    rules = call_rules(tool_format, rule_of, markers, is_parallel=tools.is_parallel) + "\n"
    if tools.forced:
        return "ws calls", rules
    if has_response:
        return "ws (calls | @response)", rules
    if tool_format.may_be_bare:
        # Text does not begin as a call does.
        return "(ws calls | PLAIN)", rules + "PLAIN: /[ \\n]*([^ \\n{\\[](.|\\n)*)?/\n"
    until, more = markers.text_until("until_call", tool_format.begin[0])
    if tools.is_parallel:
        return f"({until} behind_begin)* TEXT", rules + more
    return f"(TEXT | {until} behind_begin)", rules + more


def _argument_rules(tools: RequestedTools, named: dict[str, Part]) -> dict[str, str]:
    """Return the rule of the arguments of each tool that may be called; they become `named` parts."""
    rule_of = {}
    for index, (name, schema) in enumerate(tools.schemas.items()):
        if tools.forced and name not in tools.forced:
            continue
        path = tools.fields[name]
        is_strict = name in tools.strict and bool(schema)
        named[f"arguments_{index}"] = schema_part(schema, path) if is_strict else object_part(path)
        rule_of[name] = f"@arguments_{index}"
    return rule_of

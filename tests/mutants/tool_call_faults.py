"""Faults in how tool calls and reasoning are found in the text of an output."""

from tests.mutants.fault import Fault

PACKAGE = "scheduler_svc/front/tool_calls"
UNIT = "tests/unit/scheduler_svc/front/tool_calls"
PARSER = (f"{UNIT}/test_parser.py",)
OUTPUT = (f"{UNIT}/test_output_parser.py",)

FAULTS = (
    Fault(
        "a marker in two pieces is content",
        f"{PACKAGE}/marker_search.py",
        "        if marker is not None or may_come:\n",
        "        if marker is not None:\n",
        PARSER,
    ),
    Fault(
        "what does not fit into a call is not looked at again",
        f"{PACKAGE}/parser.py",
        "            position -= 1  # the character that does not fit may begin a marker\n",
        "",
        PARSER,
    ),
    Fault(
        "whitespace between calls is content",
        f"{PACKAGE}/parser.py",
        "            self._is_in_gap = progress is Progress.DONE\n",
        "            self._is_in_gap = False\n",
        PARSER,
    ),
    Fault(
        "whitespace waits without an end",
        f"{PACKAGE}/parser.py",
        "        if num_skipped > MAX_GAP_CHARS:\n",
        "        if False:\n",
        PARSER,
    ),
    Fault(
        "a call that breaks off is lost",
        f"{PACKAGE}/parser.py",
        "            self._add_content(self._writer.give_up())\n",
        "            self._writer.give_up()\n",
        PARSER,
    ),
    Fault(
        "a call that breaks off keeps its index",
        f"{PACKAGE}/call_writer.py",
        "            self._num_calls -= 1\n",
        "",
        PARSER,
    ),
    Fault(
        "text that events stand for comes once more as content",
        f"{PACKAGE}/call_writer.py",
        "        self._arguments.append(delta)\n        if self._streams_arguments:\n",
        "        self._arguments.append(delta)\n        if False:\n",
        PARSER,
    ),
    Fault(
        "a call of a tool that the request has not is a call",
        f"{PACKAGE}/call_writer.py",
        "        return name in self._tool_names\n",
        "        return True\n",
        PARSER,
    ),
    Fault(
        "arguments that are no object are taken",
        f"{PACKAGE}/json_calls.py",
        "        if not is_json_object(arguments):\n",
        "        if False:\n",
        PARSER,
    ),
    Fault(
        "an answer in JSON waits for its end",
        f"{PACKAGE}/json_calls.py",
        "            return bool(self._name) or meaning in OTHER_KEYS\n",
        "            return True\n",
        PARSER,
    ),
    Fault(
        "a line break in a string is JSON",
        f"{PACKAGE}/json_scanner.py",
        '        return character >= " "\n',
        "        return True\n",
        (f"{UNIT}/test_json_scanner.py",),
    ),
    Fault(
        "a number may begin with 0",
        f"{PACKAGE}/json_scanner.py",
        '    "0": _to(".", ".") | _EXPONENT,\n',
        '    "0": _to("1", _DIGITS) | _to(".", ".") | _EXPONENT,\n',
        (f"{UNIT}/test_json_scanner.py",),
    ),
    Fault(
        "a tag that begins behind a < is not found",
        f"{PACKAGE}/xml_call.py",
        '        self._tag = piece if self._may_become_end(piece) else ""\n',
        '        self._tag = ""\n',
        PARSER,
    ),
    Fault(
        "a line break in front of a tag is part of the argument",
        f"{PACKAGE}/xml_call.py",
        '(self._body.breaks_lines and f"\\n{end}".startswith(text))',
        "False",
        PARSER,
    ),
    Fault(
        "what may be a tag is lost if the call breaks off in it",
        f"{PACKAGE}/call_writer.py",
        "            self._text[:] = [undecided]\n",
        "            self._text.clear()\n",
        PARSER,
    ),
    Fault(
        "a prompt that opens the reasoning is not noticed",
        f"{PACKAGE}/chat_format.py",
        "            starts_inside = opens_reasoning(self.reasoning, prompt_end)\n",
        "            starts_inside = False\n",
        (f"{UNIT}/test_chat_format.py",),
    ),
    Fault(
        "a second marker in front is part of the reasoning",
        f"{PACKAGE}/reasoning.py",
        "            self._pass_beginning()\n        elif",
        "            self._place = _Place.REASONING\n        elif",
        OUTPUT,
    ),
    Fault(
        "the token that ends an output is in its text",
        f"{PACKAGE}/output_parser.py",
        'self._parse("" if self._tail in self._end_tokens else self._tail)',
        "self._parse(self._tail)",
        OUTPUT,
    ),
    Fault(
        "markers that are special tokens are not in the text",
        f"{PACKAGE}/chat_format.py",
        "            markers += self.tool_calls.markers\n",
        "            pass\n",
        (f"{UNIT}/test_chat_format.py",),
    ),
    Fault(
        "tools that the chat template does not show are taken",
        f"{PACKAGE}/chat_format.py",
        "        if template is None or not template.knows_tools:\n",
        "        if template is None:\n",
        (f"{UNIT}/test_chat_format.py",),
    ),
    Fault(
        "a call cannot be forced, and a request that asks for it is taken",
        f"{PACKAGE}/tool_choice.py",
        '    if tool_choice == "required":\n',
        "    if False:\n",
        (f"{UNIT}/test_tool_choice.py",),
    ),
    Fault(
        "tools stay in the prompt with tool_choice none",
        f"{PACKAGE}/tool_choice.py",
        "    if not _check_choice(tool_choice):\n        return None\n",
        "    _check_choice(tool_choice)\n",
        (f"{UNIT}/test_tool_choice.py",),
    ),
)

"""Tool calls and reasoning in chats: from a request's `tools` to the events of its outputs.

For a server, in this order:

    chat_format = ChatFormat.of(tokenizer, config.tool_call_parser, config.reasoning_parser)   # once for each model
    tools = check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)       # None: no tools
    chat_format.check_tools(tools)
    # The template gets tools.definitions. Where chat_format.needs_special_tokens(tools), `skip_special_tokens` is off.
    parser = chat_format.output_parser(tools, prompt_token_ids, end_token_ids, output_id)  # once for each choice
    events = parser.feed(delta.text)                                                           # for each delta
    events = parser.finish(is_cut=...)                                                         # once, at the end

The events are the same for a streamed answer and for a complete one, which leaves out what a
`ToolCallBroken` takes back. A choice that ends with "stop" has the finish reason "tool_calls" if it has a whole call,
does not end in a call that broke off, and its stream shows nothing of one; "length" stays "length".

Read first: events.py, formats.py, parser.py. A reader for each way of writing a call stands behind parser.py:
json_calls.py, named_call.py, xml_call.py.
"""

"""Chat templates that write calls as those of the model families do.

They are ours, and short: each has the syntax of its family for tools, calls, results and reasoning, the words by which
the format is found, and the functions of Jinja that the family uses. `modelled_on` says whose templates were read.
"""

from dataclasses import dataclass

EOS = "</s>"

# A conversation; the rows fill in TEACHES (where the tools are), CALLS (behind an assistant's text) and PROMPT.
_CHATML = """{%- if tools %}{{- '<|im_start|>system\\n' }}TEACHES{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>' + m.content + '</tool_response><|im_end|>\\n' }}
    {%- elif m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>assistant\\n' }}THINKS{{- m.content }}CALLS{{- '</s>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_TOOLS = "{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}"
_THINKS = """{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """A template, and what is known of it.

    Attributes:
        modelled_on: The models whose templates were read.
        source: The template.
        tool_calls, reasoning: The formats that it stands for.
        drops_content: It leaves out the text in front of calls.
        takes_one_call: It refuses a second call in a turn.
    """

    modelled_on: str
    source: str
    tool_calls: str
    reasoning: str | None = None
    drops_content: bool = False
    takes_one_call: bool = False


def _chatml(calls: str, teaches: str = "", thinks: str = "") -> str:
    return _CHATML.replace("TEACHES", teaches + _TOOLS).replace("CALLS", calls).replace("THINKS", thinks)


_HERMES = """{%- for c in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}{%- set c = c.function if c.function else c %}
{{- '<tool_call>\\n{"name": "' ~ c.name ~ '", "arguments": ' }}
{{- c.arguments if c.arguments is string else c.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"""

_QWEN_CODER = """{%- for c in m.tool_calls or [] %}{%- set c = c.function %}
{{- '\\n<OPENS>\\n<function=' + c.name + '>\\n' }}
{%- for key, value in c.arguments | items %}{{- '<parameter=' + key + '>\\n' }}
{%- set value = value | string if value is string or value is not iterable else value | tojson | safe %}
{{- value }}{{- '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</OPENS>' }}{%- endfor %}"""

_GLM = """{%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' + c.function.name }}
{%- for key, value in c.function.arguments.items() %}{{- '\\n<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}{{- '</arg_value>' }}{%- endfor %}
{{- '\\n</tool_call>' }}{%- endfor %}"""

_MINIMAX = """{%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}{%- for c in m.tool_calls %}
{{- '<invoke name="' + c.function.name + '">\\n' }}{%- for key, value in c.function.arguments.items() %}
{{- '<parameter name="' + key + '">' }}{{- value if value is string else value | tojson }}{{- '</parameter>\\n' }}
{%- endfor %}{{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}"""

_DEEPSEEK = """{{- bos_token }}{%- if tools %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- set ns = namespace(is_first=true) %}{%- for m in messages %}{%- set ns.is_first = true %}
{%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}{%- elif m['role'] == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}
{%- else %}{{- '<｜Assistant｜>' + m['content'] }}
{%- for tool in m['tool_calls'] or [] %}{{- '<｜tool▁calls▁begin｜>' if ns.is_first else BETWEEN }}
{%- set ns.is_first = false %}
{{- '<｜tool▁call▁begin｜>' + HEADER + ARGUMENTS + '<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜>' if m['tool_calls'] }}{{- '</s>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""

_MISTRAL = """{%- if not date is defined %}{%- set date = strftime_now('%Y-%m-%d') %}{%- endif %}{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and m == users[-1] %}
{{- '[AVAILABLE_TOOLS][' }}{%- for tool in tools %}{{- '{"type": "function", "function": {' }}
{%- for key, value in tool.function.items() if key != 'return' %}{{- '"' + key + '": ' + value | tojson }}
{{- ', ' if not loop.last }}{%- endfor %}{{- '}}' }}{{- ', ' if not loop.last }}{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}{{- '[INST]' + m.content + '[/INST]' }}{%- elif m.role == 'tool' %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{%- for c in m.tool_calls or [] if c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endfor %}WRITES{{- eos_token }}
{%- endif %}{%- endfor %}"""

_LLAMA = """{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set date_string = strftime_now('%d %b %Y') %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{{- 'Today: ' + date_string + '\\n' + system }}
{%- if tools is not none %}{{- 'TEACHES' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- for m in messages %}{%- set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if m.role == 'tool' %}{{- {'output': m.content} | tojson }}{%- elif 'tool_calls' in m %}CALLS
{%- else %}{{- m.content | trim }}{%- endif %}{{- '</s>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_LLAMA_JSON = """{%- if m.tool_calls | length != 1 %}
{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set c = m.tool_calls[0].function %}{{- '{"name": "' + c.name + '", ' }}{{- '"parameters": ' }}
{{- c.arguments | tojson }}{{- '}' }}"""

_PYTHON_CALL = """{{- c.function.name + '(' }}{%- for key, value in c.function.arguments | items %}{{- key + '=' }}
{%- if value is string %}{{- value | tojson }}{%- elif value is sameas true %}{{- 'True' }}{%- else %}{{- value }}
{%- endif %}
{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}"""

_OLMO = """{%- if m.tool_calls %}{{- '<function_calls>' }}
{%- for c in m.tool_calls %}PYTHON_CALL{{- '\\n' if not loop.last }}
{%- endfor %}{{- '</function_calls>' }}{%- endif %}"""

_JSON_LIST = """{%- if m.tool_calls %}{{- 'BEGIN[' }}{%- for c in m.tool_calls %}
{{- '{"name": "' ~ c.function.name ~ '", "arguments": ' ~ (c.function.arguments | tojson) ~ '}' }}
{{- ', ' if not loop.last }}{%- endfor %}{{- ']END' }}{%- endif %}"""

_KIMI = """{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m['tool_calls'] %}
{%- set id = 'functions.' + c['function']['name'] + ':' + (loop.index0 | string) %}
{{- '<|tool_call_begin|>' + id + '<|tool_call_argument_begin|>' }}{{- c['function']['arguments'] | tojson }}
{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}"""


# OpenAI's harmony. It ends an assistant's turn with tokens of its own, so it is not in FAMILIES.
GPT_OSS = """{%- macro kind(p) -%}{%- if p.type == 'array' -%}{{ kind(p['items']) if p['items'] else 'any' }}[]
{%- elif p.enum -%}{{ '"' + p.enum | join('" | "') + '"' }}
{%- elif p.type is string -%}{{ {'integer': 'number'}.get(p.type, p.type) }}
{%- else -%}{{ p.type | join(' | ') if p.type else 'any' }}{%- endif -%}{%- endmacro %}
{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\n\nReasoning: ' + (reasoning_effort or 'medium') + '\n\n# Valid channels: analysis, commentary, final. ' }}
{{- 'Channel must be included for every message.' }}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools }}{{- '<|end|>' }}
{%- set first = messages[0].role in ('system', 'developer') %}
{%- if first or tools %}{{- '<|start|>developer<|message|>' }}
{%- if first %}{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for tool in tools | map(attribute='function') %}{{- '// ' + tool.description + '\ntype ' + tool.name + ' = (' }}
{%- set schema = tool.parameters or {} %}{%- set needed = schema.required or [] %}
{%- for name, p in (schema.properties or {}).items() %}{{- '_: {\n' if loop.first }}
{{- '// ' + p.description + '\n' if p.description }}
{{- name ~ ('' if name in needed else '?') ~ ': ' ~ kind(p) ~ ',\n' }}
{{- '}' if loop.last }}{%- endfor %}{{- ') => any;\n\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}
{{- '<|end|>' }}{%- endif %}
{%- set turns, ns = messages[1:] if first else messages, namespace(called=none) %}
{%- for m in turns %}{%- if m.role == 'assistant' and m.tool_calls is defined %}{%- set c = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking') }}{%- endif %}
{%- set answers = turns[loop.index:] | rejectattr('tool_calls', 'defined') | map(attribute='role') | list %}
{%- if (m.content or m.thinking) and 'assistant' not in answers %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' + c.arguments | tojson }}
{{- '<|call|>' }}{%- set ns.called = c.name %}
{%- elif m.role == 'assistant' %}{%- set is_last = loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' if is_last and m.thinking is defined }}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if is_last else '<|end|>') }}
{%- elif m.role == 'tool' %}{%- if ns.called is none %}{{- raise_exception('There was no call') }}{%- endif %}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
{{- '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""


def _json_list(begin: str, end: str = "") -> str:
    return _JSON_LIST.replace("BEGIN", begin).replace("END", end)


def _deepseek(between: str, header: str, arguments: str) -> str:
    return _DEEPSEEK.replace("BETWEEN", between).replace("HEADER", header).replace("ARGUMENTS", arguments)


def _llama(teaches: str, calls: str) -> str:
    return _LLAMA.replace("TEACHES", teaches).replace("CALLS", calls)


FAMILIES = {
    "qwen3": Family(
        "Qwen2.5, Qwen3, QwQ, Exaone 4, Granite 4, MiMo", _chatml(_HERMES, thinks=_THINKS), "hermes", "deepseek_r1"
    ),
    "hermes_2_pro": Family(
        "Hermes 2 Pro and Hermes 3 (tool_use), Reka",
        _chatml(_HERMES, "<tool_call>{'arguments': {...}}").replace(
            "{{- m.content }}", "{{- m.content if not m.tool_calls }}"
        ),
        "hermes",
        drops_content=True,
    ),
    "smollm3": Family(
        "SmolLM3, which has this name for the tools, and leaves calls out",
        _chatml(_HERMES).replace("tools", "xml_tools"),
        "hermes",
    ),
    "qwen3_coder": Family(
        "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        _chatml(_QWEN_CODER.replace("OPENS", "tool_call"), thinks=_THINKS),
        "qwen3_coder",
        "deepseek_r1",
    ),
    "seed_oss": Family(
        "Seed-OSS",
        _chatml(_QWEN_CODER.replace("OPENS", "seed:tool_call"), thinks=_THINKS.replace("think", "seed:think")),
        "seed_oss",
        "seed_oss",
    ),
    "glm45": Family("GLM-4.5, GLM-4.6, Ling 3, Laguna", _chatml(_GLM, thinks=_THINKS), "glm45", "deepseek_r1"),
    "glm47": Family("GLM-4.7, Spark 2.5", _chatml(_GLM.replace("\\n", ""), thinks=_THINKS), "glm45", "deepseek_r1"),
    "minimax_m2": Family("MiniMax-M2", _chatml(_MINIMAX, thinks=_THINKS), "minimax_m2", "deepseek_r1"),
    "deepseek_v3": Family(
        "DeepSeek-V3 and R1, with vLLM's list of tools",
        _deepseek(
            "'\\n'",
            "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n'",
            "(tool['function']['arguments'] | tojson) + '\\n```'",
        ),
        "deepseek_v3",
    ),
    "deepseek_v31": Family(
        "DeepSeek-V3.1, with vLLM's list of tools; its arguments are a text",
        _deepseek("''", "tool['function']['name'] + '<｜tool▁sep｜>'", "tool['function']['arguments']"),
        "deepseek_v31",
    ),
    "kimi_k2": Family("Kimi K2", _chatml(_KIMI), "kimi_k2"),
    "mistral_v3": Family(
        "Mistral 7B v0.3, Nemo, Small 3",
        _MISTRAL.replace(
            "WRITES",
            """{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}
{%- set out = c.function | tojson %}
            {{- out[:-1] }}{{- ', "id": "' + c.id + '"}' }}{{- ', ' if not loop.last }}{%- endfor %}{{- ']' }}
            {%- else %}{{- ' ' + m.content }}{%- endif %}""",
        ),
        "mistral",
        drops_content=True,
    ),
    "mistral_v11": Family(
        "Devstral, Ministral 3",
        _MISTRAL.replace(
            "WRITES",
            """{{- m.content }}{%- for c in m.tool_calls or [] %}{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}
            {{- c.function.arguments | tojson }}{%- endfor %}""",
        ),
        "mistral",
    ),
    "magistral": Family(
        "Mistral Small 3.2, Magistral",
        _MISTRAL.replace(
            "WRITES",
            """{{- '[THINK]' + m.reasoning_content + '[/THINK]' if m.reasoning_content }}{{- m.content }}
            {%- for c in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + c.function.arguments | tojson }}
            {%- endfor %}""",
        ),
        "mistral",
        "mistral",
    ),
    "llama3": Family(
        "Llama 3.1, 3.2, 3.3",
        _llama('{"parameters": dictionary of argument name and its value}', _LLAMA_JSON),
        "llama3_json",
        drops_content=True,
        takes_one_call=True,
    ),
    "llama3_pythonic": Family(
        "Llama 3.2 and 4 with vLLM's pythonic templates, whose strings have no quotes",
        _llama(
            "Use exact format: [func_name1(param1=value1), func_name2(...)]",
            "{{- '[' }}{%- for c in m.tool_calls %}"
            + _PYTHON_CALL
            + "{{- ', ' if not loop.last }}{%- endfor %}{{- ']' }}",
        ),
        "pythonic",
        drops_content=True,
    ),
    "olmo3": Family(
        "OLMo 3",
        _chatml(_OLMO.replace("PYTHON_CALL", _PYTHON_CALL), "signatures within <functions></functions> XML tags"),
        "olmo3",
    ),
    "granite3": Family("Granite 3 (what it is told to write)", _chatml(_json_list("<|tool_call|>")), "granite"),
    "phi4_mini": Family("Phi-4-mini with vLLM's template (same)", _chatml(_json_list("functools")), "phi4_mini_json"),
    "hunyuan": Family(
        "HunYuan A13B, Apriel, Jamba", _chatml(_json_list("\\n<tool_calls>", "</tool_calls>")), "hunyuan_a13b"
    ),
    "minimax_m1": Family(
        "MiniMax-M1",
        _chatml(
            """{%- if m.tool_calls %}{{- '<tool_calls>\\n' }}{%- for c in m.tool_calls %}{{- c.function | tojson }}
{{- '\\n' }}
            {%- endfor %}{{- '</tool_calls>' }}{%- endif %}"""
        ),
        "hunyuan_a13b",
    ),
}

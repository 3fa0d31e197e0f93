import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import pytest
from transformers import PreTrainedTokenizerFast

from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.text import template_sandbox
from scheduler_svc.front.text.chat_template import ChatTemplate
from scheduler_svc.front.text.conversation import Conversation
from scheduler_svc.front.text.template_sizes import MAX_TEXT_CHARS
from scheduler_svc.front.text.tokenizer import Tokenizer
from tests.support.each_row import each_row
from tests.support.tokenizers import BOS, EOS, byte_level_backend, tokenizer_files

LLAMA3_LIKE = """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|header|>system<|/header|>\\n\\n" + system_message + eos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

LOOP_CONTROLS = """{% for m in messages %}
{% if m.role == 'assistant' and not m.content %}
{% continue %}
{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{{ loop.index0 }}/{{ loop.length }}{{ ' last' if loop.last }} {{ m.content }} {{ loop.previtem.role if not loop.first }}
{% else %}nobody{% endfor %}"""

STRICT_ROLES = """{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}
{% endfor %}"""

ODDS_AND_ENDS = """{% macro turn(m) %}<{{ m.role | upper }}>{{ caller() if caller else '' }}{% endmacro %}
{% set ns = namespace(n=0) %}{% for m in messages if m.content %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}
{{ m | tojson }} {{ m.content | tojson(indent=2) }} {{ "%s-%03d" % (m.role, ns.n) }} {{ "=" * 3 ~ ns.n ** 2 }}
{% generation %}{{ m.content.strip().split(' ')[-1] }}{% endgeneration %}{% endfor %}
{% set both %}{{ pad_token }}|{{ missing }}|{{ tools }}|{{ documents is none }}{% endset %}{{ both }}
{{ strftime_now('%Y') }} {{ dict(a=1).items() | list }} {{ messages | map(attribute='role') | join(',') }}"""

CONVERSATIONS = {
    "one": [("user", "hi")],
    "system": [("system", " be <good> & 'kind' "), ("user", "hi"), ("assistant", "ok ok"), ("user", "bye 🦊")],
    "injected": [("user", f"a{EOS}b"), ("assistant", ""), ("tool", "s"), ("user", "{{ bos_token }}"), ("user", "x")],
}


def render(source: str, messages: list[tuple[str, str]] | None = None) -> str:
    template = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})
    return template.render(Conversation.of_turns([("user", "hi")] if messages is None else messages))


def peer(directory: Path) -> Any:
    """The same files, loaded by transformers."""
    return PreTrainedTokenizerFast.from_pretrained(str(directory))


def as_dicts(messages: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", [LLAMA3_LIKE, LOOP_CONTROLS, STRICT_ROLES, ODDS_AND_ENDS])
def test_text_and_token_ids_are_those_of_transformers(
    source: str, messages: list[tuple[str, str]], tmp_path: Path
) -> None:
    files = tokenizer_files(byte_level_backend(), source)
    for file in files:
        (tmp_path / file.name).write_bytes(file.content)
    reference = peer(tmp_path)
    try:
        expected_text = reference.apply_chat_template(as_dicts(messages), tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        assert source == STRICT_ROLES
        with pytest.raises(InvalidFieldError, match=str(error)):
            render(source, messages)
        return
    expected_ids = reference.apply_chat_template(as_dicts(messages), add_generation_prompt=True)["input_ids"]

    assert render(source, messages) == expected_text
    assert Tokenizer(files).render_chat(Conversation.of_turns(messages)) == expected_ids


@pytest.mark.model
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_demo_model_gets_the_prompts_of_transformers(float32_model: Path, messages: list[tuple[str, str]]) -> None:
    reference = peer(float32_model)
    tokenizer = Tokenizer.from_directory(float32_model)

    expected = reference.apply_chat_template(as_dicts(messages), add_generation_prompt=True)["input_ids"]

    assert tokenizer.render_chat(Conversation.of_turns(messages)) == expected
    assert tokenizer.encode(messages[0][1]) == reference(messages[0][1])["input_ids"]


TOOL_JSON = (
    "{% for m in messages %}{{ m.content if m.role != 'tool' else 'T' ~ (1 // (m.content[0] == '{')) }}{% endfor %}"
)


@each_row(
    ("{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}", [("tool", "hi")], "tool"),
    ("{{ messages[0].content }}", [("user", "hi"), ("system", "hello")], "system"),
    ("{{ messages[0].content }}", [("user", "hi"), ("assistant", "hello")], None),
    ("{{ messages[0].role }}{{ messages[0].content | trim }}", [("tool", " hi ")], None),
    ("{{ messages[0].content }}", [("system", "")], None),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", [("tool", "hi"), ("system", "hi")], None),
    (TOOL_JSON, [("tool", "{}")], None),  # it fails with other words
)
def test_a_message_that_the_template_leaves_out_is_refused(
    source: str, messages: list[tuple[str, str]], left_out: str | None
) -> None:
    if left_out is None:
        render(source, messages)
        return
    with pytest.raises(InvalidFieldError, match=f"role is '{left_out}'; it must be a role that"):
        render(source, messages)


@each_row(
    ("", True), ("{{ m.tool_calls }}", False), ("{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}", False)
)
def test_tool_calls_that_the_template_leaves_out_are_refused(shows: str, is_refused: bool) -> None:
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{shows}{{% endfor %}}"
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": {}}}]
    conversation = Conversation(
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    )
    template = ChatTemplate(source, {})

    if not is_refused:
        assert "now" in template.render(conversation)
        return
    with pytest.raises(
        InvalidFieldError, match=("unset: the model's chat template does not support tool calls")
    ) as caught:
        template.render(conversation)
    assert caught.value.field == "messages[1].tool_calls_json"


# Qwen 2.5's way: any role gets a header, and without a system message there is one of the template's own.
ANY_ROLE = """{% if messages[0].role != 'system' %}<system>You are helpful.{% endif %}
{% for m in messages %}<{{ m.role.upper() }}>{{ m.content }}{% endfor %}"""
# gpt-oss' way: the developer's words have a place of their own; Llama 3.1 has a second name for the results of tools.
OWN_PLACE = """{% for m in messages %}{% if m.role in ['developer', 'system'] %}<developer># Rules {{ m.content }}
{% elif m.role in ['tool', 'ipython'] %}<ipython>{{ m.content }}
{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"""
# Gemma's and Mistral's way: what is not known is an error, and so is a turn out of order.
STRICT = """{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}
{% elif m.role == 'system' and loop.first %}[SYS]{{ m.content }}
{% elif m.role == 'observation' and loop.previtem.role == 'assistant' %}[OBS]{{ m.content }}
{% elif m.role == 'assistant' %}{{ m.content }}{% else %}{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"""
AS_USER = "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}: {{ m.content }}{% endfor %}"


@each_row(
    (ANY_ROLE, "system", ()),
    (OWN_PLACE, "developer", ("ipython",)),
    (STRICT, "system", ("observation",)),
    (AS_USER, "system", ()),
    (LLAMA3_LIKE, "system", ()),
)
def test_roles_are_known_or_system_or_refused_by_name(source: str, becomes: str, known: tuple[str, ...]) -> None:
    template = ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})

    def rendered(*turns: tuple[str, str]) -> str:
        return template.render(Conversation.of_turns(turns))

    hello = ("user", "Hello")
    developer, same = rendered(("developer", "Be kind."), hello), rendered((becomes, "Be kind."), hello)
    assert developer == same
    assert "Be kind." in developer
    assert "You are helpful." not in developer, "the developer's words are in the place of the template's own"
    for role in ("ipython", "observation", "critic", "x" * 100, "", "Developer"):
        turns = [hello, ("assistant", "ok"), (role, "21")]
        if role in known:
            assert "21" in rendered(*turns)
            continue
        with pytest.raises(InvalidFieldError) as error:
            rendered(*turns)
        assert (error.value.field, error.value.value) == ("messages[2].role", repr(role[:32]))
        assert error.value.limit.startswith("a role that the model's chat template supports, such as user")


NAMED = "{% for m in messages %}{{ m.role }}{{ m.name if shows }}: {{ m.content }}\n{% endfor %}"


@each_row(
    ({"user": ["ann", "bob"]}, True),
    ({"user": ["ann", None, "ann"], "assistant": ["eve"]}, False),
    ({"tool": ["now", "later"]}, False),  # told apart by their order
    ({"system": ["example_user", "example_assistant"], "user": ["ann"]}, True),
)
def test_names_that_tell_speakers_apart_are_refused_where_the_template_leaves_them_out(
    names: dict[str, list[str | None]], is_refused: bool
) -> None:
    messages = [
        {"role": role, "content": "hi", **({"name": name} if name else {})} for role in names for name in names[role]
    ]
    template = ChatTemplate(NAMED, {})

    assert "ann" in template.render(Conversation(messages, template_kwargs={"shows": True})) or "tool" in names
    if not is_refused:
        template.render(Conversation(messages))
        return
    with pytest.raises(InvalidFieldError, match=r"several names of the role .* drops names; put names into"):
        template.render(Conversation(messages))


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}CALL{% endfor %}{% endfor %}{{ tools }}"


@each_row(
    ("{{ c.function.name }} {{ c.function.arguments | tojson }}", 'now {"a": "ü"}'),
    ("{{ c.function.name + ' ' + c.function.arguments }}", 'now {"a": "ü"}'),  # it fails on an object
    ("{{ c.function.name }} {{ c.function.arguments }}", 'now {"a": "ü"}'),  # it would write Python's {'a': 'ü'}
    ("{{ c.function.name }}({{ c.function.arguments.a }})", "now(ü)"),
    ("{{ c.function.name }}", "now"),
)
def test_arguments_of_calls_come_in_the_form_that_the_template_wants(written: str, prompt: str) -> None:
    calls = [{"id": "a", "type": "function", "function": {"name": "now", "arguments": {"a": "ü"}}}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]

    rendered = ChatTemplate(CALLS.replace("CALL", written), {}).render(Conversation(turns))

    assert rendered == f"{prompt}None"


def test_tools_come_into_a_template_that_has_another_name_for_them() -> None:
    shown = "{% if xml_tools %}{% for tool in xml_tools[:] %}{{ tool | string }}{% endfor %}{% endif %}"
    source = shown + "{{ tools }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": "now"}}]
    template = ChatTemplate(source, {})

    assert template.knows_tools
    assert "'now'" in template.render(Conversation([{"role": "user", "content": "x"}], tools))
    assert template.render(Conversation([{"role": "user", "content": "x"}])) == "Nonex"


def test_refusal_of_the_template_names_the_field_and_says_why() -> None:
    with pytest.raises(InvalidFieldError, match="Roles must alternate") as caught:
        render(STRICT_ROLES, [("user", "a"), ("user", "b")])

    assert caught.value.field == "messages"
    assert "user, user" in str(caught.value)


@each_row(
    "{{ messages[7].role }}",
    "{{ 1 // 0 }}",
    "{{ messages | sum }}",
    "{{ 'a'.index('b') }}",
    "{{ [] | first | upper | list | random + 1 }}",
    "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "{% include 'file' %}",
    "{{ 'a' | truncate(1) }}",
    "{% for m in 5 %}{% endfor %}",
)
def test_failure_inside_a_template_is_the_request_s_error(source: str) -> None:
    with pytest.raises(InvalidFieldError, match="chat template"):
        render(source)


@each_row(
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__call__ = 1 %}",
    "{{ raise_exception.__globals__ }}{{ (raise_exception | attr('__globals__')).json }}",
    "{{ '{0.__class__}'.format(1).x.y }}",
)
def test_sandbox_keeps_a_template_from_python_s_internals(source: str) -> None:
    with pytest.raises(InvalidFieldError):
        render(source)


@each_row(
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** 10 * [1] }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ '%*d' % (99999999999, 1) }}",
    "{{ 'a'.ljust(99999999999) }}",
    "{{ range(99999999) }}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=9) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% macro two(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set ns.x = two(ns.x) %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
)
def test_template_that_explodes_ends_with_an_error(source: str) -> None:
    with pytest.raises(InvalidFieldError):
        render(source)


LONG = "{% set x = 'a ' * 4000000 %}"  # 8 million characters


@pytest.mark.parametrize(
    "source",
    [
        # Formats: a width or a precision, one behind a name, many small ones, many long values.
        "{{ '%0500000000d' | format(1) }}",
        "{{ '%.500000000f' | format(1) }}",
        "{{ '%*d' | format(500000000, 1) }}",
        "{{ '%(a)0500000000d' % {'a': 1} }}",
        "{{ '%(a)0500000000d' | format(a=1) }}",
        "{{ '%(a(b))0500000000d' % {'a(b)': 1} }}",
        "{{ '%9999d' * 10000 % ((1,) * 10000) }}",
        LONG + "{{ '%s' * 100 % ((x,) * 100) }}",
        LONG + "{{ '%(a)s' * 100 % {'a': x} }}",
        LONG + "{{ '%s' % [[x] * 100] }}",
        "{{ '%0500000000d'.encode() % 1 }}",
        "{{ '{:0500000000d}'.format(1) }}",
        "{{ '{:{w}d}'.format(1, w=500000000) }}",
        "{{ '{:{}d}'.format(1, '500000000') }}",
        "{{ '{a:500000000}'.format_map({'a': 1}) }}",
        "{{ ('{:500000000}' | safe).format(1) }}",
        LONG + "{{ ('{0}' * 100).format(x) }}",
        LONG + "{{ '{!r}'.format([x] * 100) }}",
        # A width, or something in the place of something shorter.
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.center(1000000000) }}{{ 'a'.zfill(1000000000) }}",
        "{{ 'a'.encode().ljust(1000000000) }}",
        "{{ ('\\t' * 1000).expandtabs(10000000) }}",
        "{{ ('\\n' * 1000) | indent(10000000, blank=true) }}",
        LONG + "{{ ('\\n' * 100) | indent(x, blank=true) }}",
        LONG + "{{ ('a' * 1000) | replace('a', x) }}{{ 'aaaa' | replace('', x) }}",
        LONG + "{{ ('a' * 1000).replace('a', x) }}",
        LONG + "{{ ('a' * 1000).translate({97: x}) }}",
        LONG + "{{ ('a' * 1000) | wordwrap(1, wrapstring=x) }}",
        LONG + "{{ ('http://a.bc ' * 1000) | urlize(rel=x) }}",
        # Bytes and lists.
        "{{ 'a'.encode() * 10 ** 10 }}",
        "{{ [1] | slice(10000000) | list }}",
        "{{ [1] | batch(10000000, 0) | list }}",
        # One text many times.
        LONG + "{{ range(1000) | join(x) }}{{ ([x] * 1000) | join }}",
        LONG + "{{ x.join(['a'] * 1000) }}{{ ''.join([x] * 1000) }}",
        LONG + "{% set y = " + " ~ ".join(["x"] * 50) + " %}",
        LONG + "{% set y %}" + "{{ x }}" * 50 + "{% endset %}",
        LONG + "{% macro m() %}" + "{{ x }}" * 50 + "{% endmacro %}{{ m() }}",
        LONG + "{% filter upper %}" + "{{ x }}" * 50 + "{% endfilter %}",
        LONG + "{{ [x] * 1000 }}",
        LONG + "{{ namespace(a=[x] * 1000) }}",
        LONG + "{{ dict(a=[x] * 1000).items() }}",
        LONG + "{{ ([x] * 1000) | string }}{{ ([x] * 1000) | upper }}{{ ([x] * 1000) | pprint }}",
        LONG + "{{ ([x] * 1000) | tojson }}{{ ([x] * 1000) | tojson(indent=1) }}",
        LONG + "{{ ([x] * 1000) | sort | length }}",
        LONG + "{{ ([1] * 1000) | tojson(separators=(x, ':')) }}{{ {'a': [1]} | tojson(indent=10000000) }}",
        LONG + "{% set ns = namespace(y=[]) %}{% for i in range(999) %}{% set ns.y = ns.y + [x + 'a'] %}{% endfor %}",
        LONG + "{{ ([x] * 1000) | map('upper') | list | length }}",
        # Dates.
        "{{ strftime_now('%0999999999Y') }}{{ strftime_now('%c' * 1000000) }}",
    ],
)
def test_what_would_multiply_its_input_is_not_begun(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_BUILT_CHARS", 4 * MAX_TEXT_CHARS)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidFieldError, match=r"longer than|too wide|a number above|of a date is|builds strings"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 10 * MAX_TEXT_CHARS
    finally:
        tracemalloc.stop()


def test_limits_change_no_result() -> None:
    source = (
        "{{ '%s-%03d|%5.2f' | format('a', 7, 1.5) }} {{ '%(a)s%%' % {'a': 1} }} {{ '{:>4}{!r}'.format(1, 'b') }} "
        "{{ ('<{}>' | safe).format('<') }} {{ 'a' | center(5) }} {{ 'a\\tb'.expandtabs(4) }} {{ 'a\\nb' | indent(2) }} "
        "{{ 'aba' | replace('a', 'xy', 1) }} {{ 'aba'.replace('a', '') }} {{ [1, 2] | join('-') }} "
        "{{ '-'.join(['a']) }} {{ ['b', 'A'] | sort | join }} {{ range(5) | batch(2) | list }} {{ 1.25 | round(1) }} "
        "{{ {'a': [1]} | tojson(indent=2) }} {{ [1, 'é'] | tojson }} {{ none }} {{ ['a'] | map('upper') | first }} "
        "{{ 'a b' | wordwrap(1) }} {{ 1 ~ none ~ 'x' }} {{ 'ab'.translate({97: 'c'}) }} "
        "{{ {'b': 1, 'a': 2} | dictsort }} {{ [[1], [2]] | sum(start=[]) }}"
    )
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment()
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)

    assert render(source) == plain.from_string(source).render()


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r recursive %}{{ loop(r) if loop.depth < 9 }}{% endfor %}",
        "{% for a in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    ],
)
def test_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_CPU_S", 0.1)
    started_s = time.thread_time()

    with pytest.raises(InvalidFieldError, match="took longer than"):
        render(source)

    assert time.thread_time() - started_s < 5


@each_row("{% if %}", "{% for a in b %}" * 30 + "{% endfor %}" * 30, "{{ (" + "(" * 5000)
def test_source_that_is_no_template_is_a_template_error(source: str) -> None:
    with pytest.raises(jinja2.TemplateError):
        ChatTemplate(source, {})

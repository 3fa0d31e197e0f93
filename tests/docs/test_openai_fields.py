"""Every field that OpenAI's and Anthropic's clients know is carried, without effect, or refused: one of these."""

from dataclasses import replace

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from scheduler_svc.front.anthropic import fields as anthropic_fields
from scheduler_svc.front.openai.field_reader import OPENAI, OtherFields
from scheduler_svc.front.openai.fields import ChatFields, CompletionFields, RequestFields
from scheduler_svc.front.openai.other_fields import NO_EFFECT, REFUSED
from tests.support.each_row import each_row

PARAMS = {
    CompletionFields: completion_create_params.CompletionCreateParamsStreaming,
    ChatFields: chat_create_params.CompletionCreateParamsStreaming,
}


@each_row(*PARAMS)
def test_every_field_of_openais_client_is_known(fields: type[RequestFields]) -> None:
    params: type = PARAMS[fields]
    theirs = {name for cls in (params, *vars(params)["__orig_bases__"]) for name in cls.__annotations__}
    ours = [*fields.model_fields, *NO_EFFECT, *REFUSED]
    assert theirs - set(ours) == set()
    assert len(theirs) > 17, "their class has other bases now"


# Of `messages.create` and `beta.messages.create` of Anthropic's client.
ANTHROPICS = {
    *("max_tokens", "messages", "model", "cache_control", "container", "inference_geo", "metadata", "output_config"),
    *("service_tier", "stop_sequences", "stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k"),
    *("top_p", "context_management", "mcp_servers", "output_format", "speed"),
}


def test_every_field_of_anthropics_client_is_known() -> None:
    others = anthropic_fields.OTHER_FIELDS
    assert ANTHROPICS - {*anthropic_fields.MessagesFields.model_fields, *others.no_effect, *others.refused} == set()


@each_row(
    (CompletionFields, OPENAI),
    (ChatFields, replace(OPENAI, no_effect=NO_EFFECT)),  # chats carry what the rest names
    (anthropic_fields.MessagesFields, anthropic_fields.OTHER_FIELDS),
    (anthropic_fields.CountTokensFields, anthropic_fields.OTHER_FIELDS),
)
def test_nothing_becomes_of_a_field_twice(fields: type[RequestFields], others: OtherFields) -> None:
    assert not fields.model_fields.keys() & (others.no_effect.keys() | others.refused.keys())
    assert not others.no_effect.keys() & others.refused.keys()
    for name, field in fields.model_fields.items():
        assert field.description, name

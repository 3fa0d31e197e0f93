"""Every field that OpenAI's own client knows is carried, without effect, or refused, each in one of these ways."""

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

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


@each_row(*PARAMS)
def test_nothing_becomes_of_a_field_twice(fields: type[RequestFields]) -> None:
    assert not fields.model_fields.keys() & (NO_EFFECT.keys() | REFUSED.keys())
    assert not NO_EFFECT.keys() & REFUSED.keys()
    for name, field in fields.model_fields.items():
        assert field.description, name

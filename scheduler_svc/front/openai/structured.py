"""What an answer is to look like: `response_format`, vLLM's `structured_outputs`, and its older `guided_` fields."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from octavo.generation.v1 import generation_pb2
from octavo.generation.v1 import generation_service_pb2 as pb
from octavo_shared.errors import InvalidFieldError
from scheduler_svc.front.grammars.parts import Part, message_part, object_part, schema_part
from scheduler_svc.front.openai.fields import SamplingFields
from scheduler_svc.front.openai.values import member, object_at, optional, shown
from scheduler_svc.front.text.json_text import shown_json

# vLLM's fields, and those of the native API; `grammar` is read in Lark's notation.
_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "lark", "json_object": "json_object"}
_GUIDED = ("json", "regex", "choice", "grammar")

_TYPES = '"text", "json_object" or "json_schema"'
_ONLY = {"text": ("type",), "json_object": ("type",), "json_schema": ("type", "json_schema")}
_OF_SCHEMA = ("name", "description", "schema", "strict")


def asked_part(fields: SamplingFields) -> Part | None:
    """Return what an answer follows; None: nothing holds it. Raises InvalidFieldError: a field is wrong."""
    found = [part for part in (_of_format(fields), _of_vllm(fields.structured_outputs), *_of_guided(fields)) if part]
    if len(found) > 1:
        raise InvalidFieldError(found[1].field, "set", f"unset with {found[0].field}: an answer follows one of them")
    return found[0] if found else None


def advised_schema(fields: SamplingFields) -> str:
    """Return the schema that the answer is asked, but not made, to follow: `strict` is not true. Empty: none."""
    sent = fields.response_format
    asked = sent.get("json_schema") if isinstance(sent, Mapping) and sent.get("type") == "json_schema" else None
    if not isinstance(asked, Mapping) or asked.get("strict") is True or asked.get("schema") is None:
        return ""
    return to_json(asked["schema"]).decode()


def add_advice(chat: pb.ChatMessages, schema: str) -> None:
    """Ask for JSON by a schema in the last message of the user. Raises InvalidFieldError: there is none."""
    message = next((one for one in reversed(chat.messages) if one.role == "user"), None)
    if message is None:
        rule = "true in a conversation without a user's message, which would ask for the schema"
        raise InvalidFieldError("response_format.json_schema.strict", "false", rule)
    message.content += f"\n\nAnswer with JSON that is valid by this JSON schema, and nothing else:\n{schema}"


def _of_format(fields: SamplingFields) -> Part | None:
    sent, name = fields.response_format, "response_format"
    if sent is None:
        return None
    kind = object_at(sent, name).get("type")
    if kind not in _ONLY:
        raise InvalidFieldError(f"{name}.type", shown(kind), _TYPES)
    _check_names(sent, name, _ONLY[kind])
    if kind == "text":
        return None
    if kind == "json_object":
        return object_part(name)
    path = f"{name}.json_schema"
    asked = object_at(sent.get("json_schema"), path)
    _check_names(asked, path, _OF_SCHEMA)
    is_strict = optional(asked, path, "strict", bool, "true, false")
    schema: Mapping[str, Any] = member(asked, path, "schema", dict, "a JSON schema")
    return schema_part(schema, f"{path}.schema") if is_strict else None


def _of_vllm(sent: Any) -> Part | None:
    name = "structured_outputs"
    if sent is None:
        return None
    # False asks for nothing: json_object, and the switches of vLLM's backends.
    found = {kind: value for kind, value in object_at(sent, name).items() if value is not None and value is not False}
    for kind in found:
        if kind not in _KINDS:
            rule = f"unset: an answer follows one of {', '.join(_KINDS)}"
            raise InvalidFieldError(f"{name}.{kind[:64]}", shown_json(found[kind]), rule)
    parts = [_part(kind, value, f"{name}.{kind}") for kind, value in found.items()]
    if len(parts) > 1:
        raise InvalidFieldError(parts[1].field, "set", f"unset with {parts[0].field}: an answer follows one of them")
    return parts[0] if parts else None


def _of_guided(fields: SamplingFields) -> list[Part]:
    sent = {f"guided_{kind}": (kind, getattr(fields, f"guided_{kind}")) for kind in _GUIDED}
    return [_part(kind, value, name) for name, (kind, value) in sent.items() if value is not None]


def _part(kind: str, value: Any, path: str) -> Part:
    """Return one of vLLM's kinds as a part."""
    if kind == "json":
        if not isinstance(value, str | Mapping):
            raise InvalidFieldError(path, shown_json(value), "a JSON schema, or its text")
        return schema_part(value, path)
    message = generation_pb2.Grammar()
    try:
        if kind == "choice":
            if not isinstance(value, list):
                raise TypeError("it is no array")
            message.choice.SetInParent()
            message.choice.choices.extend(value)
        else:
            setattr(message, _KINDS[kind], value)
    except TypeError as error:
        rules = {"choice": "an array of texts", "json_object": "true or false"}
        raise InvalidFieldError(path, shown_json(value), rules.get(kind, "a text")) from error
    return message_part(message, path, is_whole_path=True)


def _check_names(sent: Mapping[str, Any], path: str, known: tuple[str, ...]) -> None:
    for name, value in sent.items():
        if name not in known and value is not None:
            raise InvalidFieldError(f"{path}.{name[:64]}", shown_json(value), f"unset: {path} has {', '.join(known)}")

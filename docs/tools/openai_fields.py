"""The page of OpenAI's fields, from the models and tables that read them."""

from collections.abc import Iterable, Mapping

from pydantic_core import to_json

from scheduler_svc.front.openai.fields import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    EmbeddingFields,
    Message,
    RequestFields,
    RerankFields,
    ScoreFields,
    TokenizeFields,
)
from scheduler_svc.front.openai.other_fields import NO_EFFECT, REFUSED, FieldRule

_HEAD = """\
<!-- Written by `make docs-reference` from the code; changes here are lost. -->
# Fields of OpenAI's API

[OpenAI's API](../openai.md) says how to serve it.

A field of a request that is absent or null is unset. What is unset gets the default of the model's
`generation_config.json`, else that of the [native API](api.md), unless this page says another one. The native API
checks the ranges. A field that is not on this page is refused with 400, or named in the header
`x-octavo-ignored-fields` with `--openai-unknown-fields ignore`.
"""

_ENDPOINTS: Mapping[str, type[RequestFields]] = {
    "completions": CompletionFields,
    "chats": ChatFields,
    "embeddings": EmbeddingFields,
    "rerank": RerankFields,
    "score": ScoreFields,
    "tokenize": TokenizeFields,
    "detokenize": DetokenizeFields,
}


def page(text: str) -> str:
    """Return the page; what it was does not matter."""
    sections = [
        _HEAD,
        "## Carried\n\n" + carried_table(_ENDPOINTS),
        "## Carried in a message\n\nThe chat template gets these. Any other field is refused unless it is empty.\n\n"
        + table(("field", "what it is"), ((f"`{k}`", v.description or "") for k, v in Message.model_fields.items())),
        *other_tables(NO_EFFECT, REFUSED),
    ]
    return "\n".join(sections)


def carried_table(endpoints: Mapping[str, type[RequestFields]]) -> str:
    """Return the table of the fields that are carried, by endpoint."""
    names = dict.fromkeys(name for kind in endpoints.values() for name in kind.model_fields)
    return table(("field", "of", "what it does"), (_carried(name, endpoints) for name in names))


def other_tables(no_effect: Mapping[str, FieldRule], refused: Mapping[str, FieldRule]) -> tuple[str, str]:
    """Return the sections of the fields that are not carried."""
    return (
        "## Without effect\n\nThey may have any value: nothing in an answer depends on them.\n\n"
        + table(("field", "why"), ((f"`{name}`", rule.why) for name, rule in no_effect.items())),
        "## Refused\n\nThey may be there with a value that asks for nothing.\n\n"
        + table(("field", "may be", "why, and what serves instead"), (_refused(*item) for item in refused.items())),
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table of Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _carried(name: str, by_endpoint: Mapping[str, type[RequestFields]]) -> tuple[str, str, str]:
    endpoints = [endpoint for endpoint, kind in by_endpoint.items() if name in kind.model_fields]
    texts = dict.fromkeys(by_endpoint[endpoint].model_fields[name].description or "" for endpoint in endpoints)
    return f"`{name}`", ", ".join(endpoints), " ".join(texts)


def _refused(name: str, rule: FieldRule) -> tuple[str, str, str]:
    neutral = ", ".join(["null", *(f"`{_json(value)}`" for value in rule.neutral)])
    return f"`{name}`", neutral, rule.why


def _json(value: object) -> str:
    return to_json(value).decode()

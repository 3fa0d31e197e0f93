"""The page of the fields of Anthropic's Messages API, from the models and tables that read them."""

from collections.abc import Mapping

from docs.tools.openai_fields import carried_table, other_tables, table
from scheduler_svc.front.anthropic.fields import (
    BLOCK_FIELDS,
    NO_EFFECT,
    REFUSED,
    CountTokensFields,
    MessagesFields,
    Turn,
)
from scheduler_svc.front.openai.fields import RequestFields

_HEAD = """\
<!-- Written by `make docs-reference` from the code; changes here are lost. -->
# Fields of the Messages API

[The Messages API](../messages.md) says how to use it.

A field of a request that is absent or null is unset. What is unset gets the default of the model's
`generation_config.json`, else that of the [native API](api.md), unless this page says another one. A field that is not
on this page is refused with 400, or named in the header `x-octavo-ignored-fields` with `--openai-unknown-fields
ignore`.
"""

_ENDPOINTS: Mapping[str, type[RequestFields]] = {"messages": MessagesFields, "count_tokens": CountTokensFields}


def page(text: str) -> str:
    """Return the page; what it was does not matter."""
    sections = [
        _HEAD,
        "## Carried\n\n" + carried_table(_ENDPOINTS),
        "## Carried in a message\n\n"
        + table(("field", "what it is"), ((f"`{k}`", v.description or "") for k, v in Turn.model_fields.items())),
        "## Blocks\n\nA block of any other type is refused, and so are other fields of these.\n\n"
        + table(
            ("type", "fields"), ((f"`{k}`", ", ".join(f"`{name}`" for name in v)) for k, v in BLOCK_FIELDS.items())
        ),
        *other_tables(NO_EFFECT, REFUSED),
    ]
    return "\n".join(sections)

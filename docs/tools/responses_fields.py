"""The page of the fields of the Responses API, from the models and tables that read them."""

from docs.tools.openai_fields import other_tables, table
from scheduler_svc.front.responses.fields import ITEM_FIELDS, NO_EFFECT, REFUSED, ResponseFields

_HEAD = """\
<!-- Written by `make docs-reference` from the code; changes here are lost. -->
# Fields of the Responses API

[Responses](../responses.md) says how to use it.

What is unset gets the default of the model's `generation_config.json`, else that of the [native API](api.md). A field
that is not on this page is refused with 400, or named in the header `x-octavo-ignored-fields` with
`--openai-unknown-fields ignore`.
"""


def page(text: str) -> str:
    """Return the page; what it was does not matter."""
    carried = ((f"`{name}`", field.description or "") for name, field in ResponseFields.model_fields.items())
    items = ((f"`{kind}`", ", ".join(f"`{name}`" for name in names)) for kind, names in ITEM_FIELDS.items())
    sections = [
        _HEAD,
        "## Carried\n\n" + table(("field", "what it does"), carried),
        "## Items\n\nEach may have `id` and `status` too, which have no effect.\n\n" + table(("item", "fields"), items),
        *other_tables(NO_EFFECT, REFUSED),
    ]
    return "\n".join(sections)

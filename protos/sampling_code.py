"""What `generate.py` writes from the table of sampling parameters, octavo/values/sampling_params_table.py.

The message of the execution wire, the row that both tiers keep, and the fields of the client's value: declared in the
table once, and here as people, type checkers and buf read them.
"""

import textwrap
from collections.abc import Iterable

from octavo.values.sampling_params_table import ROW_PARAMS, SAMPLING_PARAMS, SamplingParam

_ORIGIN = "Written by `make protos` from octavo/values/sampling_params_table.py; changes here are lost."


def sources() -> dict[str, str]:
    """Return the content of each file, by its path in the repository."""
    return {
        "protos/octavo/execution/v1/sampling_params.proto": _proto(),
        "shared/octavo_shared/step_wire/sampling_row.py": _row(),
        "octavo/values/sampling_numbers.py": _numbers(),
    }


def _proto() -> str:
    lines = [
        'syntax = "proto3";',
        "",
        "package octavo.execution.v1;",
        "",
        f"// {_ORIGIN}",
        "",
        "// SamplingParams is the sampling row of a slot: numbers only. Stop conditions are the scheduler's.",
        "message SamplingParams {",
    ]
    for parameter in ROW_PARAMS:
        absent = parameter.absent if not parameter.is_public and parameter.absent else f"{parameter.row_value:g}"
        comment = _sentences(parameter.wire_doc or parameter.doc, parameter.range_words, f"Absent: {absent}.")
        lines += _field(parameter, comment, is_optional=parameter.row_value != 0)
    lines += [
        "}",
        "",
        "// SamplingDefaults is what the model's generation_config.json sets, for requests that leave it unset.",
        "message SamplingDefaults {",
    ]
    for parameter in (parameter for parameter in ROW_PARAMS if parameter.may_model_set):
        comment = _sentences("As in SamplingParams.", parameter.range_words, "Absent: the model does not say.")
        lines += _field(parameter, comment, is_optional=True)
    return "\n".join([*lines, "}", ""])


def _field(parameter: SamplingParam, comment: str, *, is_optional: bool) -> list[str]:
    presence = "optional " if is_optional else ""
    return [
        *textwrap.wrap(comment, 100, initial_indent="  // ", subsequent_indent="  // "),
        f"  {presence}{parameter.kind.wire_type} {parameter.name} = {parameter.wire_number};",
    ]


def _row() -> str:
    return "\n".join(
        [
            '"""The sampling row of a slot, as a value and as a NumPy record.',
            "",
            _ORIGIN,
            '"""',
            "",
            "from dataclasses import dataclass",
            "",
            "import numpy as np",
            "",
            "SAMPLING_ROW = np.dtype(",
            "    [",
            *(f'        ("{parameter.name}", "{parameter.kind.row_type}"),' for parameter in ROW_PARAMS),
            "    ]",
            ")",
            "",
            "",
            "@dataclass(frozen=True, slots=True)",
            "class SamplingRow:",
            '    """How to sample one slot: numbers only, neutral by default. `top_k` 0: all tokens.',
            "",
            "    `num_candidates` above 0 makes it a beam slot: nothing is sampled, the executor answers so many of",
            "    the likeliest tokens, and the scheduler chooses (`TableDelta.appended_tokens`).",
            '    """',
            "",
            *(
                f"    {parameter.name}: {parameter.kind.python_type} = {_literal(parameter, parameter.row_value)}"
                for parameter in ROW_PARAMS
            ),
            "",
            "    def as_tuple(self) -> tuple[float | int, ...]:",
            '        """Return the values in the order of `SAMPLING_ROW`."""',
            "        return (",
            *(f"            self.{parameter.name}," for parameter in ROW_PARAMS),
            "        )",
            "",
        ]
    )


def _numbers() -> str:
    public = [parameter for parameter in SAMPLING_PARAMS if parameter.is_public]
    return "\n".join(
        [
            '"""The fields of `SamplingParams` that are numbers.',
            "",
            _ORIGIN,
            '"""',
            "",
            "from dataclasses import dataclass",
            "",
            "",
            "@dataclass(frozen=True, slots=True, kw_only=True)",
            "class SamplingNumbers:",
            '    """The fields of `SamplingParams` that are numbers. None is "absent".',
            "",
            "    Attributes:",
            *_attributes(public),
            '    """',
            "",
            *(f"    {parameter.name}: {parameter.kind.python_type} | None = None" for parameter in public),
            "",
        ]
    )


def _attributes(parameters: Iterable[SamplingParam]) -> list[str]:
    lines: list[str] = []
    for parameter in parameters:
        text = _sentences(
            f"{parameter.name}: {parameter.doc}", parameter.range_words, f"Absent: {parameter.default_words}."
        )
        lines += textwrap.wrap(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 12)
    return lines


def _sentences(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)


def _literal(parameter: SamplingParam, value: float) -> str:
    return str(int(value)) if parameter.is_whole else str(float(value))

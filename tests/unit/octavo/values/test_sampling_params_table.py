"""The table of sampling parameters, what is made from it, and the public proto beside it, which is written by hand."""

import ast
import inspect
import re
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor

from octavo.execution.v1 import sampling_params_pb2
from octavo.generation.v1 import generation_pb2
from octavo.values import sampling_params_table
from octavo.values.sampling_params_table import (
    BY_NAME,
    ROW_PARAMS,
    SAMPLING_PARAMS,
    Kind,
    SamplingParam,
    Stage,
    of_stage,
)
from octavo_shared.step_wire.batch_table import BatchTable
from octavo_shared.step_wire.sampling_row import SAMPLING_ROW, SamplingRow
from tests.support.each_row import each_row
from tests.support.sample_rows import ROWS_OF_FILTERS

ROOT = Path(__file__).parents[4]
PUBLIC = [parameter for parameter in SAMPLING_PARAMS if parameter.is_public]
PUBLIC_TYPES = {
    Kind.FLOAT: FieldDescriptor.TYPE_FLOAT,
    Kind.COUNT: FieldDescriptor.TYPE_UINT32,
    Kind.SEED: FieldDescriptor.TYPE_UINT64,
}


def public_comment(name: str) -> str:
    """Return the comment above a field of the public SamplingParams."""
    source = (ROOT / "protos/octavo/generation/v1/generation.proto").read_text()
    lines = source[: re.search(rf" {name} = \d+;", source).start()].splitlines()[:-1]  # type: ignore[union-attr]
    comment: list[str] = []
    while lines[-1].lstrip().startswith("//"):
        comment.insert(0, lines.pop().strip().removeprefix("//").strip())
    return " ".join(comment)


@each_row(*PUBLIC)
def test_the_public_field_is_as_the_table_says(parameter: SamplingParam) -> None:
    field = generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name[parameter.name]

    assert field.type == PUBLIC_TYPES[parameter.kind]
    assert field.has_presence, "unset is not 0"
    if parameter.high is not None:
        assert parameter.range_words.rstrip(".") in public_comment(parameter.name)


def test_every_public_number_is_in_the_table() -> None:
    numbers = {
        field.name
        for field in generation_pb2.SamplingParams.DESCRIPTOR.fields
        if field.type in PUBLIC_TYPES.values() and not field.is_repeated
    }

    assert numbers == {parameter.name for parameter in PUBLIC}


def test_a_row_its_record_and_its_message_have_the_same_numbers() -> None:
    fields = {field.name: field for field in sampling_params_pb2.SamplingParams.DESCRIPTOR.fields}
    names = [parameter.name for parameter in ROW_PARAMS]

    assert list(SamplingRow.__dataclass_fields__) == list(SAMPLING_ROW.names or ()) == names
    assert {name: field.number for name, field in fields.items()} == {p.name: p.wire_number for p in ROW_PARAMS}
    assert SamplingRow().as_tuple() == tuple(parameter.row_value for parameter in ROW_PARAMS)
    assert {name for name, field in fields.items() if field.has_presence} == {
        parameter.name for parameter in ROW_PARAMS if parameter.row_value
    }


@each_row(
    ("temperature", [0.0, 100.0], [-0.001, 100.001, float("nan"), float("inf")], "from 0 to 100"),
    ("top_k", [0, 2**31 - 1], [-1, 2**31], "from 0 to 2147483647"),
    ("top_p", [1e-9, 1.0], [0.0, 1.001, float("nan")], "above 0 and at most 1"),
    ("presence_penalty", [-100.0, 100.0], [-100.001, float("inf")], "from -100 to 100"),
    ("max_tokens", [1, 2**32 - 1], [0], "at least 1"),
    ("seed", [0, 2**64 - 1], [-1, 2**64], "from 0 to 18446744073709551615"),
)
def test_a_range_has_its_ends_and_its_words(name: str, allowed: list[float], refused: list[float], limit: str) -> None:
    parameter = BY_NAME[name]

    assert all(parameter.allows(value) for value in allowed)
    assert not any(parameter.allows(value) for value in refused)
    assert parameter.limit == limit


def test_a_default_and_a_neutral_value_are_in_their_range() -> None:
    for parameter in SAMPLING_PARAMS:
        for value in (parameter.default, parameter.neutral):
            assert value is None or parameter.allows(value), parameter.name


@each_row(*of_stage(Stage.FILTER))
def test_the_samplers_are_compared_on_rows_with_each_filter(parameter: SamplingParam) -> None:
    """Torch, C and Triton give the same tokens of these rows: one that does not read a filter is found there."""
    assert any(getattr(row, parameter.name) != parameter.row_value for row in ROWS_OF_FILTERS)


def test_the_table_needs_nothing_that_a_client_lacks() -> None:
    tree = ast.parse(inspect.getsource(sampling_params_table))

    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    assert {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} == {
        "collections.abc",
        "dataclasses",
        "enum",
    }


def test_the_digest_of_sampling_rows_is_that_of_the_last_release() -> None:
    """A later parameter is in it only where it is used: a peer that lacks it comes to the same number until then."""
    table = BatchTable(2, 8, 4, 4)
    table.live[1] = True
    first = [parameter.name for parameter in ROW_PARAMS if (parameter.wire_number or 0) <= 13]
    for number, name in enumerate(first, 1):
        table.sampling[name][1] = number
    for parameter in ROW_PARAMS[len(first) :]:
        table.sampling[parameter.name] = parameter.row_value

    assert table.digest() == 12520377171455294787

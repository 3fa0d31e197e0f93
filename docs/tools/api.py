"""docs/reference/api.md: services, messages and enums, from the comments of the protos."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

PROTOS = Path(__file__).parents[2] / "protos"

# In the order of the page; each with what it is for.
_PACKAGES = {
    "octavo.generation.v1": "For clients, on the scheduler's main port (`--listen`).",
    "octavo.admin.v1": "For operators, on a port of its own (`--admin-listen`).",
    "octavo.discovery.v1": "For executors and schedulers that announce themselves, on `--health-listen`.",
    "octavo.execution.v1": "Between the two tiers, on the executor's port. Clients have no business here; people may "
    "look, with `GetBatchTable`.",
}

_INTRODUCTION = """\
<!-- Written by `make docs-reference` from the comments in protos/; changes here are lost. -->
# API

What the two services speak over gRPC. Both have reflection, so that `grpcurl` needs no files;
[the cookbook](../grpcurl.md) has sessions. From Python there is [`octavo.Client`](python.md).

Fields have numbers, by which they travel, and types of protobuf. `optional` means that a field which was not sent is
told from one that is 0 or empty; so it is with messages and with what is *one of* several. JSON, as `grpcurl` prints
it, leaves other fields out while they are 0, false or empty, and shows 64-bit numbers as strings.
"""

_CODES = "|".join(code.name for code in grpc.StatusCode)
_ERROR = re.compile(rf"\b({_CODES}): ")

# Indexes of lists in a FileDescriptorProto and what is in it: the path of a comment is made of them.
_MESSAGES, _ENUMS, _SERVICES, _MEMBERS = 4, 5, 6, 2


@dataclass(frozen=True, slots=True)
class _File:
    """One .proto with its comments, each found by the path of what it is about."""

    proto: FileDescriptorProto
    comments: dict[tuple[int, ...], str]

    def comment(self, *path: int) -> str:
        """Return the comment above something; paragraphs are apart by an empty line."""
        return self.comments.get(path, "")


def page(_: str) -> str:
    """Return the whole page."""
    files = _read_files()
    parts = [_INTRODUCTION]
    for package, purpose in _PACKAGES.items():
        own = [file for file in files if file.proto.package == package]
        own.sort(key=lambda file: not file.proto.service)  # the service first, then what it speaks of
        parts.append(f"## {package}\n\n{purpose}\n")
        for file in own:
            parts += _services(file)
        for file in own:
            parts += _messages(file)
            parts += _enums(file)
    return "\n".join(parts)


def _read_files() -> list[_File]:
    """Compile the protos with buf, which keeps the comments."""
    binary = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert binary, "buf is not installed: pip install buf-bin"
    command = [binary, "build", str(PROTOS), "--as-file-descriptor-set", "--output", "-"]
    files = FileDescriptorSet.FromString(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return [_File(proto, _comments(proto)) for proto in files.file if proto.package in _PACKAGES]


def _comments(proto: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    comments = {}
    for location in proto.source_code_info.location:
        paragraphs = re.split(r"\n\s*\n", location.leading_comments.strip())
        comments[tuple(location.path)] = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return comments


def _services(file: _File) -> Iterator[str]:
    for index, service in enumerate(file.proto.service):
        path = (_SERVICES, index)
        name = _name(f".{file.proto.package}.{service.name}")
        yield f"### {name}\n\n{file.comment(*path)}\n"
        for number, method in enumerate(service.method):
            yield _method(service, method, file.comment(*path, _MEMBERS, number))


def _method(service: ServiceDescriptorProto, method: MethodDescriptorProto, comment: str) -> str:
    request = f"{'stream ' if method.client_streaming else ''}{_link(method.input_type)}"
    response = f"{'stream ' if method.server_streaming else ''}{_link(method.output_type)}"
    return f"#### {service.name}.{method.name}\n\n{request} → {response}\n\n{_with_errors(comment)}\n"


def _with_errors(comment: str) -> str:
    """Return a method's comment with its errors, `CODE: when`, as a list behind the rest."""
    prose, errors = [], []
    for paragraph in comment.split("\n\n"):
        text, *found = _ERROR.split(paragraph)
        if text.strip():
            prose.append(text.strip())
        errors += [f"- `{code}`: {when.strip()}" for code, when in zip(found[::2], found[1::2], strict=True)]
    return "\n\n".join([*prose, "\n".join(errors)] if errors else prose)


def _messages(file: _File) -> Iterator[str]:
    for index, message in enumerate(file.proto.message_type):
        assert not message.nested_type, f"{message.name} has messages inside, which this page does not show"
        assert not message.enum_type, f"{message.name} has enums inside, which this page does not show"
        path = (_MESSAGES, index)
        lines = [f"### {_name(f'.{file.proto.package}.{message.name}')}", "", file.comment(*path), ""]
        if message.field:
            lines += ["| | field | type | meaning |", "|---:|---|---|---|"]
        for number, field in enumerate(message.field):
            comment = _cell(file.comment(*path, _MEMBERS, number))
            lines.append(f"| {field.number} | `{field.name}` | {_type(message, field)} | {comment} |")
        yield "\n".join(lines) + ("\n" if message.field else "")


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = _link(field.type_name) if field.type_name else FieldDescriptorProto.Type.Name(field.type)[5:].lower()
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, one of *{message.oneof_decl[field.oneof_index].name}*"
    return f"repeated {name}" if field.label == FieldDescriptorProto.LABEL_REPEATED else name


def _enums(file: _File) -> Iterator[str]:
    for index, enum in enumerate(file.proto.enum_type):
        yield _enum(file, enum, (_ENUMS, index))


def _enum(file: _File, enum: EnumDescriptorProto, path: tuple[int, ...]) -> str:
    lines = [f"### {_name(f'.{file.proto.package}.{enum.name}')}", "", file.comment(*path), ""]
    lines += ["| | value | meaning |", "|---:|---|---|"]
    for number, value in enumerate(enum.value):
        lines.append(f"| {value.number} | `{value.name}` | {_cell(file.comment(*path, _MEMBERS, number))} |")
    return "\n".join(lines) + "\n"


def _name(full_name: str) -> str:
    """Return a name as headings have it: without the dot and the word that all begin with."""
    return full_name.removeprefix(".octavo.")


def _link(full_name: str) -> str:
    """Return a link to a type of this page; the anchor is what forges and the site make of its heading."""
    if not full_name.startswith(".octavo."):
        return f"`{full_name.removeprefix('.')}`"  # of protobuf itself
    name = _name(full_name)
    return f"[{name.rpartition('.')[2]}](#{name.replace('.', '').lower()})"


def _cell(text: str) -> str:
    return text.replace("\n\n", " ").replace("|", "\\|")

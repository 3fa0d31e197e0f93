"""What people call a model of the hub: the repository, maybe a revision, maybe one of its GGUF files.

NAME/NAME@REVISION            the directory; of a repository with GGUF files only, the one in Q4_K_M, or the only one
NAME/NAME@REVISION:Q4_K_M     its GGUF file of a quantization, as llama.cpp and Ollama write it
NAME/NAME@REVISION/FILE.gguf  a GGUF file by name
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

# The quantization where a name has none, as in llama.cpp and Ollama.
_DEFAULT_QUANTIZATION = "Q4_K_M"

_NAME = re.compile(
    r"(?P<repo>[^/@:]+(/[^/@:]+)?)(@(?P<revision>[^@:]+?))?(:(?P<quantization>[\w.-]+)|/(?P<file>[^@:]+\.gguf))?"
)
_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q|F|BF|FP|MXFP|TQ)\d\w*)(?:-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE
)
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_FIRST_PART = re.compile(r"-00001-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class HubName:
    """A name, taken apart. Without `file` and `quantization` a directory is meant, if there is one."""

    repo_id: str
    revision: str | None = None
    file: str = ""
    quantization: str = ""

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF file is meant."""
        return bool(self.file or self.quantization)

    @classmethod
    def of(cls, model: str) -> "HubName | None":
        """Take a name apart; None: it is none."""
        match = _NAME.fullmatch(model)
        if match is None:
            return None
        return cls(match["repo"], match["revision"], match["file"] or "", match["quantization"] or "")


def choose_gguf(name: HubName, file_names: Collection[str]) -> list[str]:
    """Return the GGUF files that are meant, the first part first; empty: there are none, or the name leaves it open.

    Of several with a quantization the shortest name is meant: the model's own, and not a variant's.
    """
    if name.file:
        found = [each for each in file_names if each == name.file]
    else:
        wanted = (name.quantization or _DEFAULT_QUANTIZATION).lower()
        models = model_ggufs(file_names)
        found = [each for each in models if (quantization_of(each) or "").lower() == wanted]
        if not found and not name.quantization and len(models) == 1:
            found = models
    if not found:
        return []
    first = min(found, key=lambda each: (len(each), each))
    parts = _FIRST_PART.search(first)
    if parts is None:
        return [first]
    count = int(parts[1])
    return [f"{first[: parts.start()]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def model_ggufs(file_names: Collection[str]) -> list[str]:
    """Return the GGUF files that are a model, or the first part of one, and not a part for pictures."""
    return [
        each for each in file_names if each.endswith(".gguf") and "mmproj" not in each and not _LATER_PART.search(each)
    ]


def quantization_of(file_name: str) -> str | None:
    """Return the quantization that a file is named after; None: it does not say."""
    match = _QUANTIZATION.search(file_name)
    return None if match is None else match[1]


def describe_ggufs(repo_id: str, file_names: Collection[str]) -> str:
    """Return the names by which `--model` takes the GGUF files of a repository, for a message."""
    names = {
        f"{repo_id}:{found.upper()}" if (found := quantization_of(each)) else f"{repo_id}/{each}"
        for each in model_ggufs(file_names)
    }
    return ", ".join(sorted(names))

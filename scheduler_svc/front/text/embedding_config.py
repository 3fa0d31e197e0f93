"""What the files of a model say of its vectors beside their numbers: prompts by name, and sizes to cut them to."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from octavo_shared.errors import TokenizerFileError

# Of sentence-transformers, and of transformers.
SENTENCE_TRANSFORMERS_CONFIG = "config_sentence_transformers.json"
MODEL_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """What the files say.

    Attributes:
        prompts: The texts to put before a text, by name, such as "query".
        default_prompt_name: The prompt for texts whose caller names none; None: no prompt.
        dimensions: The sizes that vectors may be cut to; empty: the files name none.
        is_matryoshka: Whether vectors may be cut to any size.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    dimensions: tuple[int, ...] = ()
    is_matryoshka: bool = False

    @classmethod
    def of(cls, sentence_transformers: Mapping[str, object], model: Mapping[str, object]) -> Self:
        """Read config_sentence_transformers.json and config.json; both may be empty.

        Raises: TokenizerFileError: the prompts in the first file are damaged.
        """
        prompts = sentence_transformers.get("prompts") or {}
        default = sentence_transformers.get("default_prompt_name")
        if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
            raise TokenizerFileError(SENTENCE_TRANSFORMERS_CONFIG, "has prompts that are no object of texts")
        if default is not None and not (isinstance(default, str) and default in prompts):
            raise TokenizerFileError(SENTENCE_TRANSFORMERS_CONFIG, "has a default_prompt_name that is no prompt of it")
        both = {**sentence_transformers, **model}
        sizes = both.get("matryoshka_dimensions")
        dimensions = sorted(size for size in sizes if type(size) is int) if isinstance(sizes, list) else []
        return cls(prompts, default, tuple(dimensions), not dimensions and both.get("is_matryoshka") is True)

    def sizes(self, embedding_size: int) -> str:
        """Return what `dimensions` must be for vectors of a size, in words."""
        if self.is_matryoshka:
            return f"from 1 to {embedding_size}"
        if self.dimensions:
            return " or ".join(map(str, sorted({*self.dimensions, embedding_size})))
        return f"{embedding_size} or unset: the model's files name no shorter vectors (matryoshka_dimensions)"

    def can_cut_to(self, dimensions: int, embedding_size: int) -> bool:
        """Return whether vectors of a size may be cut to `dimensions` numbers."""
        if dimensions == embedding_size or dimensions in self.dimensions:
            return True
        return self.is_matryoshka and 1 <= dimensions <= embedding_size

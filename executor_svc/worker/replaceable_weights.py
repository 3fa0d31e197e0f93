"""New weights of a model that runs, in place of the ones that it has; see `Worker.update_weights`.

What is wrong with the files is found before the first tensor is overwritten: their names, shapes and number formats,
and that the kernels and caches, which stay, are those that an executor started with these files would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from executor_svc.checkpoint.model import Model
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.scaled_codes import CodesConfig
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.device.returnable_memory import ReturnableMemory
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.kernels import ChosenModel
from executor_svc.models.selection import (
    has_head_of_its_own,
    matrix_formats,
    read_model_config,
    refuse_other_embeddings,
    scales_of_cache,
)
from executor_svc.worker.interface import Agree
from octavo.values.wording import shown
from octavo_shared.errors import DeviceLostError, ModelLoadError
from octavo_shared.step_wire.model_file import find_link_out

if TYPE_CHECKING:  # its rules need pydantic, which a machine that only measures may lack
    from executor_svc.config import ExecutorConfig


class ReplaceableWeights:
    """The weights of a rank.

    Args:
        chosen: The model, with its weights.
        checkpoint: They came from it.
        directory: Of the checkpoint.
        config: The settings of the executor.
        is_hashed: Whether this rank makes the digest.

    Attributes:
        file_bytes: Size of the files of the checkpoint.
    """

    def __init__(
        self,
        chosen: ChosenModel,
        checkpoint: Checkpoint,
        directory: ModelDirectory,
        config: ExecutorConfig,
        *,
        is_hashed: bool,
    ) -> None:
        assert isinstance(chosen.model, Decoder), "the others are refused"
        self._chosen, self._decoder, self._config, self._is_hashed = chosen, chosen.model, config, is_hashed
        self._config_json, self.file_bytes = checkpoint.config_json(), checkpoint.file_bytes()
        self._parsed: ModelConfig = read_model_config(directory, config)
        self._codes: CodesConfig | None = None if checkpoint.first_codes() is None else checkpoint.codes
        self._formats: Mapping[str, str] = {} if self._codes is None else dict(checkpoint.formats)
        self.memory = ReturnableMemory(chosen.model.weights.map.memory)

    def replace(self, folder: Path, weights_digest: str, agree: Agree) -> tuple[str, str]:
        """Load the weights of a folder; return their model_hash and their digest, empty where it is not made.

        Args:
            folder: With safetensors files, and maybe config.json.
            weights_digest: That they must have; empty: any.
            agree: Called when nothing is left to refuse.

        Raises: ModelLoadError: they are refused, and nothing has changed. DeviceLostError: it failed half way.
        """
        checkpoint = self._open(folder)
        model_hash = checkpoint.model_hash(self._config.quantization)
        has_begun = False
        with ExitStack() as at_end:
            digest = None

            def begin() -> None:
                nonlocal digest, has_begun
                if self._is_hashed and weights_digest:
                    _require_digest(checkpoint, folder, weights_digest)
                elif self._is_hashed:
                    digest = at_end.enter_context(checkpoint.digest())
                agree(model_hash)
                has_begun = True
                self.memory.allocate()

            checkpoint.when_checked = begin
            try:
                self._chosen.load(checkpoint)
                found = weights_digest if digest is None else digest.result()
            except Exception as error:  # whatever it is, some tensors are old and some new
                if not has_begun:
                    raise
                raise DeviceLostError(f"loading new weights failed half way: {error}") from error
        self.memory.is_lost = False
        return model_hash, found

    def _open(self, folder: Path) -> Checkpoint:
        """Return the weights of a folder. Raises: ModelLoadError: they need another executor, or may not be read."""
        allowed = [Path(each).resolve() for each in self._config.weights_dir]
        try:
            link = find_link_out(folder, allowed)  # each rank has a disk of its own
        except OSError as error:
            raise ModelLoadError(f"{folder} cannot be read: {error.strerror}") from error
        if link is not None:
            raise ModelLoadError(f"{link} is a link out of --weights-dir; put the file itself there")
        checkpoint = Checkpoint(
            folder,
            allow_requantization=self._config.allow_requantization,
            restores_codes=self._chosen.stored is None,
            config_json=self._config_json,
        )
        if (folder / "config.json").is_file():
            self._check_config(ModelDirectory(folder))
        self._check_codes(folder, checkpoint)
        config = self._decoder.config
        if config.tie_word_embeddings and has_head_of_its_own(checkpoint, config):
            raise ModelLoadError(
                f"{folder} contains the tensor {config.names.head}.weight, which differs from the embedding; the "
                "executor has one matrix for both"
            )
        if config.encoder is not None:
            refuse_other_embeddings(checkpoint, folder, config)
        if self._chosen.cache_scales and scales_of_cache(checkpoint, self._chosen, config.names) != list(
            self._chosen.cache_scales
        ):
            raise ModelLoadError(f"{folder} has other scales of an FP8 cache than the executor; they cannot be changed")
        return checkpoint

    def _check_config(self, directory: ModelDirectory) -> None:
        found = replace(read_model_config(directory, self._config), source=self._parsed.source)
        if found != self._parsed:
            names = (name for name in ModelConfig.__dataclass_fields__ if _differ(found, self._parsed, name))
            raise ModelLoadError(f"{directory.source} is of another model: it has other {', '.join(sorted(names))}")

    def _check_codes(self, folder: Path, checkpoint: Checkpoint) -> None:
        codes = None if checkpoint.first_codes() is None else checkpoint.codes
        if codes != self._codes:
            kinds = " and ".join("unquantized" if each is None else each.kind.name for each in (codes, self._codes))
            raise ModelLoadError(f"the weights of {folder} and of the executor are stored in other formats: {kinds}")
        for name, number_format in self._formats.items():
            if (found := checkpoint.formats.get(name, number_format)) != number_format:
                raise ModelLoadError(
                    f"{folder} contains the tensor {shown(name)} in {found}; the executor has it in {number_format}"
                )
        if self._codes is None and self._config.quantization == "none" and self._chosen.keeps_bfloat16:
            for told, number_format in matrix_formats(checkpoint, self._decoder.config).items():
                if number_format != "BF16":
                    raise ModelLoadError(
                        f"{told} is {number_format}, but the executor keeps matrices in bfloat16, as it has found them"
                    )


def _require_digest(checkpoint: Checkpoint, folder: Path, weights_digest: str) -> None:
    """Raise ModelLoadError if files have another digest than was asked for; all of them are read once for that."""
    with checkpoint.digest() as digest:
        if (found := digest.result()) != weights_digest:
            raise ModelLoadError(f"{folder} has the digest {found}, not {weights_digest} as was asked for")


def _differ(one: object, other: object, name: str) -> bool:
    return bool(getattr(one, name) != getattr(other, name))


def refuse_updates(config: ExecutorConfig, reason: str | None) -> None:
    """Raise ModelLoadError if new weights are to be taken and, for a reason, cannot be."""
    if config.weights_dir and reason is not None:
        raise ModelLoadError(f"--weights-dir is set, but {reason}: remove it")


def why_not_replaceable(model: Model, chosen: ChosenModel) -> str | None:
    """Return why the weights of a model stay as they are, as the end of a sentence; None: they can be replaced."""
    if not isinstance(model, ModelDirectory):
        return "the weights of a GGUF file cannot be replaced"
    if not isinstance(chosen.model, Decoder):
        return "transformers' code runs this model, whose weights cannot be replaced"
    if chosen.path.dense == "torchao":
        return "torchao has quantized the weights, which cannot be replaced"
    return None

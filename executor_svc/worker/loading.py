"""From settings to a worker: find the model, make it, load its weights. Next: `executor_svc/worker/assembly.py`."""

import errno
import logging
from pathlib import Path

import torch

from executor_svc.cache.block_count import check_cache_settings
from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.model import AnyCheckpoint, Model, open_checkpoint, open_model
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.model_location import find_model_path
from executor_svc.checkpoint.pooling_modules import PoolingModules
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.device.selection import find_device
from executor_svc.models.encoder import encoder_kind
from executor_svc.models.encoder_decoder import EncoderDecoder
from executor_svc.models.kernels import ChosenModel, check_compute_dtype, warn_of_kernels
from executor_svc.models.language_model import ModelShape
from executor_svc.models.memory_needs import check_memory
from executor_svc.models.selection import choose_model, read_model_config, torch_dtype
from executor_svc.models.weight_format import STORED_NAMES, choose_dtype
from executor_svc.numerics.identity import find_numerics, log_numerics
from executor_svc.parallel.group import SINGLE_RANK, TensorParallelGroup
from executor_svc.worker.assembly import ModelIdentity, assemble_worker, cache_shape_of
from executor_svc.worker.encoder_loading import load_encoder_worker, model_id, read_pooling, refuse_ranks
from executor_svc.worker.interface import Worker
from executor_svc.worker.replaceable_weights import ReplaceableWeights, refuse_updates, why_not_replaceable
from octavo_shared.errors import ModelLoadError
from octavo_shared.process.events import Event

logger = logging.getLogger(__name__)


def load_worker(
    config: ExecutorConfig,
    group: TensorParallelGroup = SINGLE_RANK,
    device: torch.device | None = None,
    local_size: int = 1,
) -> Worker:
    """Load a model and make its worker.

    Args:
        config: The settings of the executor.
        group: The ranks that share the model; all of them load it at the same time.
        device: Of this rank; None: the first of the kind that is configured.
        local_size: How many ranks share the memory of this machine.

    Raises:
        ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    directory = find_model(config.model)
    device = device or find_device(config.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one
    # A GGUF file does not say in what its model was trained.
    default = {"dtype": "bfloat16"} if isinstance(directory, GGUFModel) else {}
    dtype = choose_dtype(config.dtype, {**default, **directory.config()}, device)
    check_compute_dtype(config.compute_dtype, torch_dtype(dtype), device)
    config = config.model_copy(update={"dtype": dtype})
    if isinstance(directory, ModelDirectory) and (kind := encoder_kind(directory.config())) is not None:
        return load_encoder_worker(config, directory, kind, device)
    if isinstance(directory, ModelDirectory) and (combined := directory.left_out()) and group.rank == 0:
        told = f"{combined} is served for text alone: its vision tower is left out"
        print(f"octavo executor notice: {told}", flush=True)  # `octavo up` shows it
    pooling = read_pooling(config, directory)
    try:
        chosen = choose_model(directory, config, device, group)
    except (MemoryError, OSError, RuntimeError) as error:
        if not _is_lack_of_memory(error):
            raise
        raise ModelLoadError(f"out of memory: the model in {directory.source} does not fit") from error
    refuse_updates(config, why_not_replaceable(directory, chosen))
    if not chosen.has_head:
        _check_embedder(pooling, directory)
    if group.rank == 0:
        logger.info(Event("kernels", in_use=chosen.kernels))
        is_said = chosen.quantization != "none" or chosen.stored is not None
        weights = f"; weights in {chosen.weights}" if is_said else ""
        computed = "" if config.compute_dtype == "float32" else f"; computed in {config.compute_dtype}"
        print(f"octavo executor kernels: {chosen.kernels}{weights}{computed}", flush=True)  # `octavo up` shows it
        warn_of_kernels(chosen.path.warning)
    shape, source = chosen.model.shape, directory.source
    model_len = _checked_model_len(shape, config.max_model_len, source)
    if not chosen.has_head and config.max_model_len is None and pooling is not None:
        model_len = min(model_len, pooling.max_tokens or model_len)
    check_cache_settings(config, cache_shape_of(chosen), local_size)
    if device.type == "cpu" and group.size == 1:  # of several ranks, `check_model` has asked
        logger.info(Event("memory", model=check_memory(_read_already(directory), config)))
    checkpoint = open_checkpoint(
        directory, allow_requantization=config.allow_requantization, restores_codes=chosen.stored is None
    )
    stored = checkpoint.number_formats()
    weights = dtype if chosen.quantization == "none" else chosen.quantization
    kept = {name for number_format, name in STORED_NAMES.items() if number_format == weights}
    if chosen.stored is None and stored != kept and group.rank == 0:
        logger.info(Event("weights_converted", stored=",".join(sorted(stored)), weights=weights))
    weights_digest = _load_weights(chosen, checkpoint, group.rank)
    if group.rank == 0 and (told := checkpoint.rounding.sentence()):
        print(f"octavo executor notice: {told}", flush=True)  # `octavo up` shows it
    # Ranks load from other disks, and one of them hashes too: their first collective has to be short for all.
    group.wait_for_all()
    numerics = find_numerics(chosen, group.size, device)
    if group.rank == 0:
        log_numerics(numerics, weights_digest)
    identity = ModelIdentity(
        model_id=model_id(config.model),
        model_hash=checkpoint.model_hash(config.quantization),
        max_model_len=model_len,
        # What the model cannot produce ends nothing, and is no id that a step may name.
        eos_token_ids=tuple(token_id for token_id in directory.eos_token_ids() if 0 <= token_id < shape.vocab_size),
        sampling_defaults=directory.sampling_defaults() if group.rank == 0 else {},
        tokenizer_files=directory.tokenizer_files(),
        numerics_id=numerics.numerics_id,
        is_invariant=numerics.is_invariant,
        weights_digest=weights_digest,
        why_not_invariant=numerics.why_not_invariant or "",
        pooling=pooling,
        warning=chosen.path.warning,
        is_generative=chosen.has_head,
        **_of_decoder(chosen, directory, is_told=group.rank == 0),
    )
    if not identity.tokenizer_files and group.rank == 0:
        logger.warning(Event("no_tokenizer", directory=str(directory.path), serves="token ids only"))
    replaceable = None
    if config.weights_dir:
        assert isinstance(directory, ModelDirectory), "the others are refused"
        assert isinstance(checkpoint, Checkpoint), "as they have"
        replaceable = ReplaceableWeights(chosen, checkpoint, directory, config, is_hashed=group.rank == 0)
    return assemble_worker(chosen, identity, config, device, group, local_size, replaceable)


def _is_lack_of_memory(error: Exception) -> bool:
    """Return whether an error is one that Python, the system, or torch on a CPU or GPU has for lack of memory."""
    is_torchs = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or is_torchs or getattr(error, "errno", None) == errno.ENOMEM


def _of_decoder(chosen: ChosenModel, directory: Model, *, is_told: bool) -> dict[str, tuple[int, ...]]:
    """Return what a model with an encoder says of the tokens of its decoder, by name."""
    if not isinstance(chosen.model, EncoderDecoder):
        return {}
    assert isinstance(directory, ModelDirectory), "no other kind of file has such a model"
    if (ignored := directory.ignored_defaults()) and is_told:
        print(f"octavo executor notice: generation_config.json sets {ignored}, which requests do not get", flush=True)
    starts, banned = directory.decoder_start_token_ids(), directory.banned_token_ids()
    names = {"decoder_start_token_id or forced_bos_token_id": starts, "bad_words_ids": banned}
    vocab_size = chosen.model.shape.vocab_size
    for name, token_ids in names.items():
        if unknown := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
            raise ModelLoadError(
                f"{directory.path} has the token {unknown[0]} in {name}; its tokens are 0 to {vocab_size - 1}"
            )
    return {"decoder_start_token_ids": starts, "banned_token_ids": banned}


def _load_weights(chosen: ChosenModel, checkpoint: AnyCheckpoint, rank: int) -> str:
    """Load the weights; return their digest, which rank 0 makes meanwhile for all."""
    if rank:
        chosen.load(checkpoint)
        return ""
    with checkpoint.digest() as digest:
        chosen.load(checkpoint)
        return digest.result()


def find_model(model: str) -> Model:
    """Return what `--model` names, downloaded if need be. Raises: ModelLoadError: there is no such model."""
    return open_model(find_model_path(model))


def check_model(config: ExecutorConfig, *, are_ranks_here: bool = True) -> None:
    """Raise ModelLoadError if so many ranks cannot share the model, or memory lacks; nothing of it is loaded.

    Args:
        config: The settings of the executor.
        are_ranks_here: Whether all ranks are on this machine, as far as that is known.
    """
    directory = find_model(config.model)
    if isinstance(directory, ModelDirectory) and (kind := encoder_kind(directory.config())) is not None:
        refuse_ranks(config, kind)
    pooling = read_pooling(config, directory)
    if not read_model_config(directory, config).has_head:
        _check_embedder(pooling, directory)
    if config.device == "cpu" and are_ranks_here:
        logger.info(Event("memory", model=check_memory(_read_already(directory), config)))


def _check_embedder(pooling: PoolingModules | None, model: Model) -> None:
    """Raise ModelLoadError if a model without a head makes no vectors either."""
    if pooling is None:
        raise ModelLoadError(
            f"{model.source} describes a model without a head, which makes vectors alone, but not how it pools: "
            "use --pooling last, or mean"
        )


def _read_already(model: Model) -> Path | GGUFModel:
    """Return what `check_memory` takes; the header of a GGUF file need not be read again."""
    return model if isinstance(model, GGUFModel) else model.path


def _checked_model_len(shape: ModelShape, max_model_len: int | None, source: Path) -> int:
    limit = shape.max_position_embeddings
    if max_model_len is None:
        return limit
    if max_model_len < 1 or (shape.has_position_limit and max_model_len > limit):
        raise ModelLoadError(f"max_model_len is {max_model_len}; {source} allows 1 to {limit}")
    return max_model_len

"""From settings to the worker of an encoder: vectors of texts, or the scores of a classification head."""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from executor_svc.checkpoint.gguf.model import GGUFModel
from executor_svc.checkpoint.model import Model
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.checkpoint.pooling_modules import PoolingModules, read_pooling_modules
from executor_svc.checkpoint.weights import Checkpoint
from executor_svc.config import ExecutorConfig
from executor_svc.device.probe import device_probe
from executor_svc.models.encoder import Encoder, EncoderKind, read_encoder_config
from executor_svc.models.kernels import FoundLibrary, find_library, warn_of_kernels
from executor_svc.models.pooling import EmbeddingHead, Head, Pooler, ScoreFunction, ScoringHead
from executor_svc.models.selection import torch_dtype
from executor_svc.models.weight_format import number_format_of
from executor_svc.native.compiled_code import code_digest
from executor_svc.numerics.identity import digest_of
from executor_svc.worker.encoder_worker import EncoderWorker
from executor_svc.worker.replaceable_weights import refuse_updates
from octavo_shared.errors import ModelLoadError, UnsupportedModelError
from octavo_shared.process.events import Event
from octavo_shared.step_wire.executor_info import ExecutorInfo
from octavo_shared.step_wire.step import PoolingTask

# Raised by hand when outputs change and no other part of the numerics id does.
REVISION = 1

_logger = logging.getLogger(__name__)

# The blocks of a step's texts in a block table: they have none.
_BLOCK_SIZE = 16

# As sentence-transformers pools where nothing is said.
_MEAN = PoolingModules("mean", is_normalized=False)

_FUNCTIONS: Mapping[str, ScoreFunction] = {"Sigmoid": "sigmoid", "Identity": "identity"}


@dataclass(frozen=True, slots=True)
class _Made:
    """An encoder that is loaded, and what is to be said of it."""

    pooler: Pooler
    vocab_size: int
    max_positions: int
    num_token_types: int
    kernels: str
    numerics: Mapping[str, str]
    why_not_invariant: str


def load_encoder_worker(
    config: ExecutorConfig, directory: ModelDirectory, kind: EncoderKind, device: torch.device
) -> EncoderWorker:
    """Load an encoder and make its worker.

    Raises: ModelLoadError: the model, or a setting, does not work; the message names the file or the setting.
    """
    refuse_ranks(config, kind)
    refuse_updates(config, f"{kind.family} is an encoder, whose weights cannot be replaced")
    if config.pooling == "off":
        raise ModelLoadError("pooling is off, but an encoder does nothing else: remove --pooling")
    source = directory.path / "config.json"
    modules = None if kind.purpose == "scores" else read_pooling(config, directory) or _MEAN
    checkpoint = Checkpoint(directory.path)
    found = find_library(torch_dtype(config.dtype), device, config.cpu_kernels)
    reason = _why_not_own(config, directory, kind, found)
    if reason:
        made = _make_with_transformers(config, directory, kind, modules, device, reason)
    else:
        made = _make_own(config, directory, kind, modules, checkpoint, found)
    limit = made.max_positions
    published = limit if modules is None or modules.max_tokens is None else min(limit, modules.max_tokens)
    if config.max_model_len is not None and not 1 <= config.max_model_len <= limit:
        raise ModelLoadError(f"max_model_len is {config.max_model_len}; {source} allows 1 to {limit}")
    with checkpoint.digest() as digest:
        weights_digest = digest.result()
    numerics_id = digest_of(made.numerics)
    _logger.info(Event("numerics", numerics_id=numerics_id, weights_digest=weights_digest, **made.numerics))
    _logger.info(Event("kernels", in_use=made.kernels))
    print(f"octavo executor kernels: {made.kernels}", flush=True)  # `octavo up` shows it
    warn_of_kernels(found.warning)
    tasks = frozenset(made.pooler.heads)
    info = ExecutorInfo(
        instance_id=uuid.uuid4().hex,
        model_id=model_id(config.model),
        model_hash=checkpoint.model_hash(config.quantization),
        dtype=config.dtype,
        block_size_tokens=_BLOCK_SIZE,
        num_device_blocks=0,
        num_host_blocks=0,
        max_model_len=config.max_model_len or published,
        vocab_size=made.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_message_bytes=config.max_message_bytes,
        eos_token_ids=(),
        numerics_id=numerics_id,
        is_invariant=not made.why_not_invariant,
        weights_digest=weights_digest,
        why_not_invariant=made.why_not_invariant,
        warning=found.warning,
        pooling_tasks=tasks,
        embedding_size=made.pooler.size_of(PoolingTask.EMBED),
        num_scores=made.pooler.size_of(PoolingTask.SCORE),
        num_token_types=made.num_token_types,
        is_generative=False,
    )
    tokenizer_files = directory.tokenizer_files()
    if not tokenizer_files:
        _logger.warning(Event("no_tokenizer", directory=str(directory.path), serves="token ids only"))
    return EncoderWorker(info, made.pooler, tokenizer_files, device, device_probe(device))


def refuse_ranks(config: ExecutorConfig, kind: EncoderKind) -> None:
    """Raise ModelLoadError if several ranks are to share an encoder."""
    if config.tp > 1:
        raise ModelLoadError(f"tp is {config.tp}, but {kind.family} is an encoder, which runs on one rank: use --tp 1")


def read_pooling(config: ExecutorConfig, model: Model) -> PoolingModules | None:
    """Return how vectors are pooled: as --pooling says, else as the model does; None: there are none.

    Raises: ModelLoadError: the model asks for what is not supported, or several ranks share the model.
    """
    if config.pooling == "off":
        return None
    chosen = config.pooling
    if chosen != "auto":
        modules: PoolingModules | None = PoolingModules(chosen, is_normalized=True)
    else:
        modules = model.pooling() if isinstance(model, GGUFModel) else read_pooling_modules(model.path)
    if modules is not None and config.tp > 1:
        raise ModelLoadError(
            f"tp is {config.tp}, but embeddings are computed on one rank: use --tp 1, or --pooling off to only generate"
        )
    return modules


def score_function(values: Mapping[str, object], num_scores: int, source: Path) -> ScoreFunction:
    """Return what a cross-encoder makes of its raw scores, as sentence-transformers' CrossEncoder does.

    Raises: ModelLoadError: config.json names a function that is not supported.
    """
    nested = values.get("sentence_transformers")
    named = (nested.get("activation_fn") if isinstance(nested, dict) else None) or values.get(
        "sbert_ce_default_activation_function"
    )
    if named is None:
        return "sigmoid" if num_scores == 1 else "identity"
    function = _FUNCTIONS.get(str(named).rpartition(".")[2])
    if function is None:
        raise ModelLoadError(f"{source} has the activation function {named}; supported are {', '.join(_FUNCTIONS)}")
    return function


def model_id(model: str) -> str:
    """Return the name of a model: of a directory its last part, of a GGUF file too, without .gguf."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def _why_not_own(config: ExecutorConfig, directory: ModelDirectory, kind: EncoderKind, found: FoundLibrary) -> str:
    """Return why our own code does not run an encoder; empty: it does.

    Raises: ModelLoadError: a setting needs our own code.
    """
    reason = "" if found.library is not None else found.reason
    if not kind.is_own:
        reason = f"Octavo's own code does not have {kind.family}"
    else:
        try:
            read_encoder_config(directory.config(), directory.path / "config.json", kind)
        except UnsupportedModelError as error:
            reason = str(error)
    settings = {
        f"quantization is {config.quantization}": config.quantization != "none",
        f"compute_dtype is {config.compute_dtype}": config.compute_dtype != "float32",
        "numerics is invariant": config.numerics == "invariant",
    }
    for setting in (setting for setting, is_set in settings.items() if is_set and reason):
        raise ModelLoadError(f"{setting}, which needs the kernels in C for an encoder; but {reason}")
    return reason


def _make_with_transformers(
    config: ExecutorConfig,
    directory: ModelDirectory,
    kind: EncoderKind,
    modules: PoolingModules | None,
    device: torch.device,
    reason: str,
) -> _Made:
    # Seconds, which most models need not wait.
    import transformers

    from executor_svc.models import transformers_encoder

    _logger.info(Event("model_code", code="transformers", reason=reason))
    values, source = directory.config(), directory.path / "config.json"
    longest = transformers_encoder.max_positions(values, kind, source)
    encoder = transformers_encoder.load_transformers_encoder(directory.path, kind, torch_dtype(config.dtype), device)
    heads: dict[PoolingTask, Head]
    if modules is None:
        function = score_function(values, encoder.num_scores, source)
        heads = {PoolingTask.SCORE: transformers_encoder.GivenScores(encoder.num_scores, function)}
    else:
        heads = {PoolingTask.EMBED: EmbeddingHead(modules, encoder.hidden_size)}
    parts = {"model": f"transformers {transformers.__version__}", "torch": torch.__version__, "weights": config.dtype}
    parts |= {"numpy": np.__version__, "device": device.type, "head": head_name(heads)}
    return _Made(
        Pooler(encoder, heads),
        encoder.vocab_size,
        longest,
        encoder.num_token_types,
        f"transformers, because {reason}",
        parts,
        f"transformers runs the model, because {reason}",
    )


def _make_own(
    config: ExecutorConfig,
    directory: ModelDirectory,
    kind: EncoderKind,
    modules: PoolingModules | None,
    checkpoint: Checkpoint,
    found: FoundLibrary,
) -> _Made:
    values, source = directory.config(), directory.path / "config.json"
    encoder_config = read_encoder_config(values, source, kind)
    assert found.library is not None, "else transformers runs the model"
    number_format = number_format_of(config.quantization, config.compute_dtype)
    in_bfloat16 = config.compute_dtype == "bfloat16"
    encoder = Encoder(encoder_config, found.library, number_format, in_bfloat16=in_bfloat16)
    encoder.load(checkpoint)
    heads: dict[PoolingTask, Head]
    if modules is None:
        assert encoder.head is not None, "the purpose of the model is to score"
        function = score_function(values, encoder_config.num_scores, source)
        heads = {PoolingTask.SCORE: ScoringHead(*encoder.head, encoder_config.num_scores, function)}
    else:
        heads = {PoolingTask.EMBED: EmbeddingHead(modules, encoder_config.hidden_size)}
    weights = "float32" if config.quantization == "none" else config.quantization
    parts = {
        "revision": str(REVISION),
        "model": "own encoder",
        "code": code_digest(found.library.path),
        "weights": weights,
    }
    parts |= {} if config.compute_dtype == "float32" else {"compute": config.compute_dtype}
    # Functions of NumPy's that round, of the few numbers of a vector.
    parts |= {
        "numpy": np.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "head": head_name(heads),
    }
    threads = torch.get_num_threads()
    kernels = f"C ({found.library.instructions}), {threads} thread{'s' if threads > 1 else ''}"
    return _Made(
        Pooler(encoder, heads),
        encoder_config.vocab_size,
        encoder_config.max_positions,
        encoder_config.num_token_types,
        kernels,
        parts,
        "",
    )


def head_name(heads: Mapping[PoolingTask, Head]) -> str:
    """Return what heads do, for the numerics id."""
    return "; ".join(f"{task.name} {head}" for task, head in heads.items())

"""The numerics id: executors with equal ids promise equal bits, for equal weights and equal requests.

If an id is too coarse, two releases differ in silence; if it is too fine, each patch of a library that computes nothing
gives another id. So it covers what computes on this executor's path, and nothing else:

- revision: REVISION below, raised by hand; what no other part sees.
- model: which code lays out the model, ours or a release of transformers.
- dense, attention, sampling, states: which kernels do each; the last one of models that have some.
- code: the machine code and constants of the C library, as compiled here. So compiler, flags and processor count as far
  as they change code, and a comment in a source does not (`executor_svc/native/compiled_code.py`).
- triton, kernels: on a GPU, the release that compiles our kernels, and their sources (`triton_parts`).
- torch, processor: only if torch computes something; on the invariant path it only allocates and moves.
- weights, cache: number formats; of a GGUF file all that its matrices have.
- compute: what inputs of products are rounded to, if they are.
- ranks: of tensor parallelism, since each number of them adds up in an order of its own.
- filters: what changes and filters logits, in the order of the sampler.
- probe: the bits of a fixed computation (`probe.py`); only of an invariant path, where they mean something.

It does not cover what an invariant path does not depend on: threads, block size, batch limits, memory, slots for
adapters: a row without an adapter has the bits that it has where there are none, and adapters are computed by the code
that it covers. Nor the weights: their digest stands beside it, and that of an adapter beside that.

REVISION. Most changes of ours are seen by the code or by the probe. Neither sees how a config.json becomes a
`ModelConfig`. `tests/numerics/recorded_numerics.json` has both, the configurations of all families and the bits of the
probe, and a test fails when one of them is another one. If the change was meant, raise REVISION, say so in the
changelog, and record anew. Keep it if no output is another one, as with a new family.
"""

import ast
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from executor_svc.attention.cache_format import FORMAT_NAMES
from executor_svc.models.config import ModelConfig
from executor_svc.models.decoder import Decoder
from executor_svc.models.kernels import ChosenModel, FoundLibrary, make_model
from executor_svc.models.weight_format import NUMBER_FORMATS, ComputeDtype, Quantization
from executor_svc.native.compiled_code import code_digest
from executor_svc.native.library import NativeLibrary
from executor_svc.native.sampling import NativeSampling
from executor_svc.native.structs import FILE_FORMATS
from executor_svc.numerics.probe import probe_bits, probe_file_format, probe_models_of
from executor_svc.sampler.sampler import Sampler
from octavo.values.sampling_params_table import Stage, of_stage
from octavo_shared.process.events import Event

REVISION = 1

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Numerics:
    """What an executor says of its arithmetic.

    Attributes:
        numerics_id: 64 hexadecimal digits.
        why_not_invariant: In a few words; None: it is.
        parts: What the id is made of, by name.
    """

    numerics_id: str
    why_not_invariant: str | None
    parts: Mapping[str, str]

    @property
    def is_invariant(self) -> bool:
        """Whether an output depends on its request alone."""
        return self.why_not_invariant is None


def find_numerics(chosen: ChosenModel, num_ranks: int, device: torch.device) -> Numerics:
    """Return what the arithmetic of a model is."""
    path, library = chosen.path, chosen.library
    uses_torch = {path.dense, path.sampler, path.attention, path.states or "C"} != {"C"}
    parts = {"revision": str(REVISION), "model": "own", "dense": path.dense}
    parts |= {"attention": path.attention, "sampling": path.sampler}
    if path.states is not None:
        parts["states"] = path.states
    if path.dense == "transformers":
        import transformers  # seconds, which most models need not wait

        parts["model"] = f"transformers {transformers.__version__}"
    if library is not None:
        parts["code"] = code_digest(library.path)  # it calls nothing of the system's maths that rounds
    if uses_torch:
        parts |= {"torch": torch.__version__, "processor": _processor(device)}
    if device.type == "cuda":
        parts |= triton_parts()
    parts["weights"] = chosen.weights
    if chosen.compute_dtype != "float32":
        parts["compute"] = chosen.compute_dtype
    parts |= {"cache": FORMAT_NAMES[chosen.cache_dtype], "ranks": str(num_ranks), "filters": filter_order()}
    if library is not None and chosen.why_not_invariant is None:
        formats: Any = {"compute_dtype": chosen.compute_dtype, "cache_dtype": chosen.cache_dtype}
        probes = [probe_native(library.path, each, **formats) for each in _probed(chosen)]
        if isinstance(chosen.model, Decoder) and (models := probe_models_of(chosen.model.config)):
            probes += [probe_native(library.path, each, **formats, models=models) for each in _probed(chosen)]
        used = set() if chosen.stored is None else chosen.stored.used
        probes += [probe_file_format(NativeLibrary(library.path, 1), each) for each in FILE_FORMATS if each in used]
        parts["probe"] = ",".join(probes)
    return Numerics(digest_of(parts), chosen.why_not_invariant, parts)


def _probed(chosen: ChosenModel) -> Sequence[Quantization]:
    """Return settings for probes that together compute in all formats of a model's weights, except formats of files.

    There is at least one, which has attention and sampling too.
    """
    if chosen.stored is None:
        return [chosen.quantization]
    found = [name for name, number_format in NUMBER_FORMATS.items() if number_format in chosen.stored.used]
    return found or ["none"]


def log_numerics(numerics: Numerics, weights_digest: str) -> None:
    """Write a line to the log: two lines that differ show why two executors have different numerics ids."""
    parts = {
        name: value[:16] if name in ("code", "kernels", "probe") else value for name, value in numerics.parts.items()
    }
    ids = {"numerics_id": numerics.numerics_id, "weights_digest": weights_digest}
    why_not = numerics.why_not_invariant
    _logger.info(Event("numerics", **ids, is_invariant=why_not is None, because=why_not, **parts))


def probe_native(
    path: Path,
    quantization: Quantization = "none",
    compute_dtype: ComputeDtype = "float32",
    num_threads: int = 1,
    cache_dtype: torch.dtype = torch.float32,
    models: Mapping[str, ModelConfig] | None = None,
) -> str:
    """Return the bits of the probe with the kernels of a compiled library; see `probe_bits`.

    One thread is enough for so little work, and need not wait for others on a busy machine.
    """
    found = FoundLibrary(NativeLibrary(path, num_threads))
    formats: Any = {"quantization": quantization, "compute_dtype": compute_dtype}
    make = partial(make_model, dtype=torch.float32, device=torch.device("cpu"), found=found, **formats)
    return probe_bits(make, Sampler(NativeSampling(path, num_threads)), cache_dtype, models)


def filter_order() -> str:
    """Return the numbers by which the sampler changes and filters logits, in its order."""
    return ",".join(parameter.name for stage in (Stage.PROCESSOR, Stage.FILTER) for parameter in of_stage(stage))


def digest_of(parts: Mapping[str, str]) -> str:
    """Return the SHA-256 of named parts, each with its length."""
    hasher = hashlib.sha256(b"octavo numerics 1")
    for name, value in parts.items():
        for text in (name.encode(), value.encode()):
            hasher.update(len(text).to_bytes(8, "little") + text)
    return hasher.hexdigest()


def _processor(device: torch.device) -> str:
    """Return what torch's kernels are chosen by."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability()
    return torch.cuda.get_device_name(device)


def triton_parts() -> dict[str, str]:
    """Return the parts of the numerics id that say what kernels in Triton compute."""
    return {"triton": version("triton"), "kernels": sources_digest(*_sources())}


def sources_digest(*sources: str) -> str:
    """Return the SHA-256 of Python sources without their comments and docstrings, which compute nothing."""
    hasher = hashlib.sha256()
    for source in sources:
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
        text = ast.unparse(tree).encode()
        hasher.update(len(text).to_bytes(8, "little") + text)
    return hasher.hexdigest()


def _sources() -> list[str]:
    folder = files("executor_svc.triton_kernels")
    modules = sorted((each for each in folder.iterdir() if each.name.endswith(".py")), key=lambda each: each.name)
    return [module.read_text(encoding="utf-8") for module in modules]

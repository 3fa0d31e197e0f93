"""What a model needs is what its weights take, and a sentence refuses what does not fit, with what would."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as FileType
from safetensors.numpy import save_file

from executor_svc.checkpoint.gguf.rounding import HELD_BITS
from executor_svc.config import ExecutorConfig
from executor_svc.models import memory_needs
from executor_svc.models.file_formats import HOLDERS
from executor_svc.models.memory_needs import ModelSummary, OutOfMemoryError, check_memory, summarize_model
from executor_svc.models.weight_format import NUMBER_FORMATS, Quantization
from executor_svc.native.library import NativeLibrary
from octavo_shared.errors import ModelLoadError
from tests.numerics.native import library_path
from tests.support.each_row import each_row
from tests.support.gguf_files import write_small_gguf

GB = 10**9
LARGE = ModelSummary("LlamaForCausalLM", ("Q8_0",), 8 * GB, int(8.5 * GB), int(8.5 * GB), 100_000, 32_768, True)


def test_every_type_takes_what_is_said() -> None:
    library = NativeLibrary(library_path("widest"), 1)

    held = {kind: sum(library.matrix_bytes(formats[0], 480, 512)) * 8 / 480 / 512 for kind, formats in HOLDERS.items()}

    assert held == pytest.approx(dict(HELD_BITS), rel=0.02)  # panels begin at whole lines


@each_row("none", "bfloat16", "int8", "int8-a8", "int4")
def test_safetensors_take_what_a_quantization_makes_of_them(quantization: Quantization, *, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    save_file({"w": np.ones((480, 512), np.float16)}, tmp_path / "model.safetensors")
    library = NativeLibrary(library_path("widest"), 1)

    held = summarize_model(tmp_path, quantization).held_bytes

    assert held == sum(library.matrix_bytes(NUMBER_FORMATS[quantization], 480, 512))


def test_the_header_alone_is_read(tmp_path: Path) -> None:
    summary = summarize_model(write_small_gguf(tmp_path / "m.gguf", FileType.Q4_0))

    assert summary == ModelSummary(
        architecture="LlamaForCausalLM",
        formats=("Q4_0",),
        num_weights=256 * 256 + 256,
        file_bytes=(tmp_path / "m.gguf").stat().st_size,
        held_bytes=256 * 256 * 5 // 8 + 256 * 4,
        token_bytes=2 * 2 * 2 * 64 * 4,
        max_model_len=64,
        is_gguf=True,
    )
    assert summary.needed_bytes() == summary.held_bytes + 64 * summary.token_bytes + 400_000_000
    with pytest.raises(
        ModelLoadError, match=r"m.gguf: the tensor token_embd.weight is TQ1_0, which is not held exactly"
    ):
        summarize_model(write_small_gguf(tmp_path / "m.gguf", FileType.TQ1_0))
    rounded = summarize_model(tmp_path / "m.gguf", allow_requantization=True)
    assert (rounded.formats, rounded.held_bytes) == (("TQ1_0",), 256 * 256 * 8.5 // 8 + 256 * 4)


@each_row(
    (FileType.F16, {}, 32),
    (FileType.F16, {"float_bytes": 2}, 16),
    (FileType.BF16, {}, 16),
    (FileType.BF16, {"quantization": "int4"}, 5),
    (FileType.Q4_0, {"quantization": "int8"}, 8.5),
    (FileType.Q4_0, {"float_bytes": 2}, 5),
)
def test_plain_numbers_become_what_is_asked_for_and_codes_stay(
    kind: FileType, settings: dict[str, Any], bits: float, *, tmp_path: Path
) -> None:
    summary = summarize_model(write_small_gguf(tmp_path / "m.gguf", kind), **settings)

    assert abs(summary.held_bytes - 256 * 256 * bits / 8) <= 256 * 4


@each_row(
    (LARGE, 10 * GB, None),
    (LARGE, 8 * GB, "m needs 9.3 GB of memory, 8.5 GB of it for weights, and 8.0 GB are free; a file in Q6_K (about "),
    (LARGE, 2 * GB, "2.0 GB are free; no smaller format would fit either: free memory, or take a smaller model"),
    (
        replace(LARGE, state_bytes=GB),
        GB // 2,
        "1.8 GB are for the KV cache, states and the programs: lower --kv-cache-gib, --max-num-seqs or --max-model-len",
    ),
    (LARGE, GB // 2, "0.8 GB are for the KV cache and the programs: lower --kv-cache-gib or --max-model-len"),
    (replace(LARGE, is_gguf=False, held_bytes=16 * GB), 10 * GB, "; --quantization int8-a8 (about 9.3 GB) would fit"),
    (replace(LARGE, is_gguf=False, held_bytes=16 * GB), 7 * GB, "7.0 GB are free; --quantization int4 (about 6.3 GB)"),
)
def test_what_does_not_fit_is_refused_with_what_would(
    summary: ModelSummary, available: int, sentence: str | None
) -> None:
    told = summary.why_too_large("m", summary.needed_bytes(), available)

    assert told is None if sentence is None else sentence in str(told)


@each_row(({}, 400 * GB / 300), ({"state_cache_gib": 0}, GB), ({"state_cache_gib": 1.0, "tp": 2}, GB + 2 * 2**30))
def test_saved_states_come_on_top_of_a_number_of_blocks(settings: dict[str, object], num_bytes: float) -> None:
    summary = replace(LARGE, held_bytes=GB, token_bytes=1000, state_bytes=10**7)
    config = ExecutorConfig.model_validate({"model": "m", "num_device_blocks": 62_500, "max_num_seqs": 1, **settings})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_needs, "summarize_model", lambda *_, **__: summary)
        patch.setattr(memory_needs, "available_memory_bytes", lambda: 0)
        with pytest.raises(OutOfMemoryError, match=f"needs {summary.needed_bytes(int(num_bytes)) / GB:.1f} GB"):
            check_memory(Path(), config)


def test_slots_are_what_is_too_much_where_fewer_of_them_would_fit() -> None:
    summary = replace(LARGE, state_bytes=GB // 10)
    needed = summary.needed_bytes(max_num_seqs=32)

    told = str(summary.why_too_large("m", needed, needed - GB, max_num_seqs=32))

    assert told.endswith("; --max-num-seqs 22 would fit: the states of 32 sequences take 3.2 GB")


@each_row(
    ({}, 1, 0.2 * GB, False),
    ({}, 1, 0.5 * GB, True),
    ({}, 2, 0.5 * GB, False),
    ({"kv_cache_gib": 1.0}, 1, 1.4 * GB, False),
    ({"kv_cache_gib": 1.0}, 1, 1.5 * GB, True),
    ({"kv_cache_gib": 1.0, "tp": 2}, 1, 1.5 * GB, False),
    ({"num_device_blocks": 2**16}, 1, 2.5 * GB, False),
    ({"num_device_blocks": 2**16}, 1, 2.7 * GB, True),
    ({"num_device_blocks": 2**16, "kv_cache_dtype": "int8"}, 1, 0.9 * GB, False),
    ({"num_device_blocks": 2**16, "kv_cache_dtype": "int8"}, 1, 1.1 * GB, True),
    ({"num_device_blocks": 2**16, "compute_dtype": "bfloat16"}, 1, 1.7 * GB, True),
)
def test_settings_count(
    settings: dict[str, object], num_executors: int, available: float, fits: bool, *, tmp_path: Path
) -> None:
    config = ExecutorConfig.model_validate({"model": "tiny", **settings})
    path = write_small_gguf(tmp_path / "m.gguf", FileType.Q8_0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_needs, "available_memory_bytes", lambda: int(available))
        if fits:
            assert check_memory(path, config, num_executors).endswith(f", {available / GB:.1f} GB free")
        else:
            with pytest.raises(OutOfMemoryError, match="tiny needs "):
                check_memory(path, config, num_executors)

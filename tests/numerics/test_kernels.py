"""A model is the same on every kernel, and the kernels are chosen as asked."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from executor_svc.attention.native_backend import NativeAttentionBackend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.checkpoint.model_directory import ModelDirectory
from executor_svc.config import ExecutorConfig
from executor_svc.models.families import parse_config
from executor_svc.models.kernels import CpuKernels, make_model
from executor_svc.native.build import NativeUnavailableError
from executor_svc.worker.loading import load_worker
from octavo_shared.errors import ModelLoadError
from octavo_shared.step_wire.step import TableDelta
from tests.numerics.architectures import save_tiny_architecture
from tests.numerics.conftest import TinyModel
from tests.numerics.driver import RecordingSampler, StepDriver
from tests.numerics.native import native_library
from tests.numerics.reference import assert_close, random_prompt, reference_logits
from tests.numerics.tiny_models import VARIANTS

KERNELS: tuple[CpuKernels, ...] = ("native", "torch")


@pytest.fixture(autouse=True)
def _library() -> None:
    """Fail with the reason where the library cannot be had: the executor would serve with torch instead."""
    native_library("widest")


def driver(model: TinyModel, **settings: object) -> StepDriver:
    return StepDriver(load_worker(ExecutorConfig(model=str(model.directory), num_device_blocks=64, **settings)))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_on_every_kernel(
    variant: str, kernels: CpuKernels, tiny_models: dict[str, TinyModel], recorder: RecordingSampler
) -> None:
    model, prompts = tiny_models[variant], [random_prompt(30), random_prompt(1, seed=1), random_prompt(17, seed=2)]
    ours = driver(model, cpu_kernels=kernels)

    ours.prefill(prompts, num_new_tokens=2)
    assert_close(recorder.logits, torch.stack([reference_logits(model, prompt)[-1] for prompt in prompts]))
    ours.execute(TableDelta())

    continued = [ours.worker.table.tokens_of(slot).tolist()[:-1] for slot in range(3)]
    assert_close(recorder.logits, torch.stack([reference_logits(model, tokens)[-1] for tokens in continued]))


@pytest.mark.parametrize("kernels", KERNELS)
def test_attention_in_torch_beside_every_dense_kernel(
    kernels: CpuKernels, tiny_models: dict[str, TinyModel], recorder: RecordingSampler
) -> None:
    model, prompts = tiny_models["gqa"], [random_prompt(30), random_prompt(17, seed=2)]
    ours = driver(model, cpu_kernels=kernels, attention_backend="torch", block_size_tokens=5)

    ours.prefill(prompts)

    assert ours.worker.info.block_size_tokens == 5
    assert_close(recorder.logits, torch.stack([reference_logits(model, prompt)[-1] for prompt in prompts]))


def test_the_attention_is_logged_with_its_block_size(
    tiny_models: dict[str, TinyModel], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        infos = [driver(tiny_models["gqa"], attention_backend=name).worker.info for name in ("auto", "torch")]

    assert [info.block_size_tokens for info in infos] == [16, 16]
    assert [message for message in caplog.messages if "attention_backend" in message] == [
        "event=attention_backend name=native block_size_tokens=16 reason='cpu_kernels decides'",
        "event=attention_backend name=torch block_size_tokens=16 reason='asked for'",
    ]


def test_attention_for_another_device_is_refused(tiny_models: dict[str, TinyModel]) -> None:
    with pytest.raises(
        ModelLoadError, match=("attention_backend is triton, but it needs a CUDA device; use --attention-b")
    ):
        driver(tiny_models["gqa"], attention_backend="triton")


def test_models_of_transformers_have_the_same_choice(tmp_path: Path, recorder: RecordingSampler) -> None:
    reference = save_tiny_architecture(tmp_path, "OlmoForCausalLM", {})
    prompt = random_prompt(30)
    settings = {"model": str(tmp_path), "num_device_blocks": 64, "block_size_tokens": 7}

    for name in ("auto", "torch"):
        ours = StepDriver(load_worker(ExecutorConfig.model_validate({**settings, "attention_backend": name})))
        ours.prefill([prompt])
        assert ours.worker.info.block_size_tokens == 7
        with torch.inference_mode():
            assert_close(recorder.logits, reference(torch.tensor([prompt])).logits[0, -1:])
    with pytest.raises(
        ModelLoadError, match=("attention_backend is flash_attn, but it needs a CUDA device; use --attent")
    ):
        load_worker(ExecutorConfig.model_validate({**settings, "attention_backend": "flash_attn"}))


def test_int8_is_another_model_to_a_fleet(tiny_models: dict[str, TinyModel]) -> None:
    hashes = {driver(tiny_models["gqa"], quantization=q).worker.info.model_hash for q in ("none", "int8")}

    assert len(hashes) == 2


def test_the_cache_of_all_ranks_of_a_machine_must_fit(
    tiny_models: dict[str, TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_svc.cache.block_count.available_memory_bytes", lambda: 2**30)
    monkeypatch.setattr("executor_svc.worker.loading.assemble_worker", None)  # it looks once the weights are loaded
    config = ExecutorConfig(model=str(tiny_models["gqa"].directory), kv_cache_gib=0.25, host_cache_gib=0.25)

    with pytest.raises(ModelLoadError, match=r"would take 1\.5 GiB \(0\.5 GiB for each of 3 ranks\), but 1\.0 GiB"):
        load_worker(config, local_size=3)


def make(model: TinyModel, dtype: torch.dtype, cpu_kernels: CpuKernels) -> object:
    config = parse_config(ModelDirectory(model.directory).config(), Path("config.json"))
    return make_model(config, dtype, torch.device("cpu"), cpu_kernels=cpu_kernels).attention


def test_the_c_library_is_chosen_for_float32(tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["gqa"]

    assert isinstance(make(model, torch.float32, "auto"), NativeAttentionBackend)
    assert isinstance(make(model, torch.bfloat16, "auto"), TorchAttentionBackend)
    assert isinstance(make(model, torch.float32, "torch"), TorchAttentionBackend)
    with pytest.raises(ModelLoadError, match="only device cpu and dtype float32"):
        make(model, torch.bfloat16, "native")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(num_threads: int) -> object:
        raise NativeUnavailableError("no C compiler was found; install gcc")

    monkeypatch.setattr("executor_svc.models.kernels.load_library", unavailable)


@pytest.mark.usefixtures("no_compiler")
def test_torch_serves_where_the_library_cannot_be_had(tiny_models: dict[str, TinyModel]) -> None:
    assert isinstance(make(tiny_models["gqa"], torch.float32, "auto"), TorchAttentionBackend)
    with pytest.raises(ModelLoadError, match="cpu_kernels is native, but no C compiler was found"):
        make(tiny_models["gqa"], torch.float32, "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("no_compiler")
def test_int8_without_the_library_is_refused_unless_it_is_asked_for(
    dtype: str, tiny_models: dict[str, TinyModel]
) -> None:
    with pytest.raises(
        ModelLoadError, match="int8, which needs the kernels in C on a CPU, but no C compiler was found"
    ):
        driver(tiny_models["gqa"], quantization="int8", dtype=dtype)

    driver(tiny_models["gqa"], quantization="int8", dtype=dtype, cpu_kernels="torch")


@pytest.fixture
def threads() -> Iterator[None]:
    """Leave this process the threads that it has."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


C = rf"C \({native_library('widest').instructions}\)"


@pytest.mark.parametrize(
    ("architecture", "settings", "words"),
    [
        ("LlamaForCausalLM", {}, rf"{C}, 2 threads"),
        ("LlamaForCausalLM", {"num_threads": 1}, rf"{C}, 1 thread"),
        ("LlamaForCausalLM", {"quantization": "int8"}, rf"{C}, 2 threads; weights in int8"),
        ("LlamaForCausalLM", {"cpu_kernels": "torch"}, r"torch, 2 threads, because cpu_kernels is torch"),
        (
            "LlamaForCausalLM",
            {"attention_backend": "torch", "block_size_tokens": 16},
            rf"{C} for dense work, torch for the rest, 2 threads",
        ),
        (
            "LlamaForCausalLM",
            {"dtype": "bfloat16"},
            r"torch, 2 threads, because the kernels in C support only float32, and dtype is bfloat16",
        ),
        (
            "LlamaForCausalLM",
            {"dtype": "bfloat16", "quantization": "int8"},
            rf"{C} for int8 products, torch for the rest, 2 threads, because .* dtype is bfloat16; weights in int8",
        ),
        ("OPTForCausalLM", {}, rf"{C}, 2 threads"),
        ("MixtralForCausalLM", {"quantization": "int8"}, rf"{C}, 2 threads; weights in int8"),
        (
            "OlmoForCausalLM",
            {},
            rf"{C} for attention and sampling, transformers for the rest, 2 threads, because Octavo.s own decoder .*",
        ),
    ],
)
@pytest.mark.usefixtures("threads")
def test_the_kernels_in_use_are_told_in_one_line(
    architecture: str,
    settings: dict[str, object],
    words: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_tiny_architecture(tmp_path, architecture, {})
    config = ExecutorConfig.model_validate(
        {"model": str(tmp_path), "num_device_blocks": 64, "num_threads": 2, **settings}
    )
    capsys.readouterr()

    with caplog.at_level(logging.INFO):
        load_worker(config)

    [line] = [message for message in caplog.messages if message.startswith("event=kernels ")]
    [told] = [line for line in capsys.readouterr().out.splitlines() if "kernels" in line]
    assert re.fullmatch(f"octavo executor kernels: {words}", told)
    assert told.removeprefix("octavo executor kernels: ")[:20].partition(";")[0] in line


def test_one_openmp_runtime_is_loaded() -> None:
    """Two would be two pools of threads that fight for the cores."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()

    assert len({line.split()[-1] for line in lines if "libgomp" in line}) == 1

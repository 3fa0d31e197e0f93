"""The attention backend is the one that was asked for, or the best; what cannot be is refused in one sentence."""

import sys
import warnings
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.metadata import version

import pytest
import torch

from executor_svc.attention.installed_libraries import InstalledLibraries, find_installed_libraries, why_not_loaded
from executor_svc.attention.interface import AttentionLayer
from executor_svc.attention.rules import (
    AttentionNeeds,
    BackendRules,
    FlashAttention2Rules,
    FlashAttention3Rules,
    InvariantRules,
    TorchRules,
    TritonRules,
    XformersRules,
)
from executor_svc.attention.selection import BackendName, ChosenBackend, choose_backend
from executor_svc.attention.torch_backend import TorchAttentionBackend
from executor_svc.config import ExecutorConfig, FakeConfig
from executor_svc.device.selection import find_device
from octavo_shared.errors import ModelLoadError
from tests.support.each_row import each_row

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
NOTHING = InstalledLibraries()
ALL = InstalledLibraries(flash_attn="2.8.3.post2", has_flash_attn_3=True, xformers="0.0.35", triton="3.6.0")
FLASH_2 = InstalledLibraries(flash_attn="2.8.3.post2")
XFORMERS = InstalledLibraries(xformers="0.0.35", triton="3.7.1")
PLAIN, WINDOW, CAP = AttentionLayer(0.1), AttentionLayer(0.1, 64), AttentionLayer(0.1, soft_cap=30.0)
ALIBI = AttentionLayer(0.1, alibi_slopes=(0.5, 0.25))
SINKS = AttentionLayer(0.1, sinks=torch.empty(2, device="meta"))
BIASES = AttentionLayer(1.0, distance_biases=torch.empty(2, 129, device="meta"))
READS = AttentionLayer(scale=1.0, reads_only=True)


@dataclass(frozen=True, slots=True)
class Situation:
    """What is asked for, on which device, for which model."""

    name: BackendName = "auto"
    capability: tuple[int, int] | None = (8, 0)
    dtype: torch.dtype = BFLOAT16
    installed: InstalledLibraries = NOTHING
    head_dim: int = 128
    layers: tuple[AttentionLayer, ...] = (PLAIN,)
    block_size: int | None = None
    is_invariant: bool = False
    cache_dtype: torch.dtype | None = None
    value_begin: int = 0

    def choose(self) -> ChosenBackend:
        model = self.dtype, 2, 1, self.head_dim, self.layers
        needs = AttentionNeeds(*model, self.capability, self.cache_dtype, self.value_begin)
        return choose_backend(self.name, needs, self.block_size, self.installed, is_invariant=self.is_invariant)


CHOSEN: list[tuple[Situation, type[BackendRules], int]] = [
    # auto
    (Situation(capability=None, dtype=FLOAT32), TorchRules, 16),
    (Situation(capability=None, dtype=FLOAT32, installed=ALL, block_size=3), TorchRules, 3),
    (Situation(), TritonRules, 16),
    (Situation(installed=ALL), TritonRules, 16),
    (Situation(capability=(9, 0)), TritonRules, 16),
    (Situation(capability=(9, 0), installed=FLASH_2), TritonRules, 16),
    (Situation(capability=(9, 0), installed=ALL), FlashAttention3Rules, 16),
    (Situation(capability=(9, 0), installed=ALL, block_size=24), FlashAttention3Rules, 24),
    (Situation(capability=(9, 0), installed=ALL, layers=(WINDOW, CAP)), FlashAttention3Rules, 16),
    (Situation(capability=(9, 0), installed=ALL, layers=(PLAIN, ALIBI)), TritonRules, 16),
    (Situation(capability=(9, 0), installed=ALL, layers=(PLAIN, SINKS)), TritonRules, 16),
    (Situation(capability=(9, 0), installed=ALL, dtype=FLOAT32), TritonRules, 16),
    (Situation(capability=(10, 0), installed=ALL), TritonRules, 16),
    (Situation(capability=(7, 5), dtype=FLOAT16, installed=ALL), TorchRules, 16),
    (Situation(block_size=24), TorchRules, 24),
    # by name
    (Situation("torch", capability=None, dtype=FLOAT32), TorchRules, 16),
    (Situation("torch", capability=(9, 0), installed=ALL), TorchRules, 16),
    (Situation("triton", block_size=32), TritonRules, 32),
    (Situation("flash_attn", installed=FLASH_2), FlashAttention2Rules, 256),
    (Situation("flash_attn", installed=FLASH_2, dtype=FLOAT16, block_size=512), FlashAttention2Rules, 512),
    (Situation("flash_attn", installed=FLASH_2, layers=(WINDOW, CAP, ALIBI)), FlashAttention2Rules, 256),
    (Situation("flash_attn", installed=ALL), FlashAttention2Rules, 256),
    (Situation("flash_attn", capability=(9, 0), installed=ALL), FlashAttention3Rules, 16),
    (Situation("flash_attn", capability=(9, 0), installed=ALL, layers=(ALIBI,)), FlashAttention2Rules, 256),
    (Situation("flash_attn", capability=(12, 0), installed=ALL), FlashAttention2Rules, 256),
    (Situation("xformers", installed=XFORMERS), XformersRules, 64),
    (Situation("xformers", installed=XFORMERS, block_size=128), XformersRules, 128),
    # a format of the cache
    (Situation(capability=(9, 0), installed=ALL, cache_dtype=torch.int8), TritonRules, 16),
    (Situation(capability=(8, 0), cache_dtype=torch.float8_e4m3fn), TritonRules, 16),
    (Situation(capability=(7, 5), dtype=FLOAT16, cache_dtype=torch.int8), TorchRules, 16),
    (Situation("torch", cache_dtype=torch.float8_e5m2), TorchRules, 16),
    (Situation("flash_attn", capability=(9, 0), installed=ALL, cache_dtype=BFLOAT16), FlashAttention3Rules, 16),
    (Situation(is_invariant=True, cache_dtype=torch.int8), InvariantRules, 16),
    # a latent cache
    (Situation(capability=(9, 0), installed=ALL, head_dim=576, value_begin=64), TritonRules, 16),
    (Situation(head_dim=576, value_begin=65), TorchRules, 16),
    # invariant
    (Situation(capability=(9, 0), installed=ALL, is_invariant=True), InvariantRules, 16),
    (Situation(head_dim=576, value_begin=64, is_invariant=True), InvariantRules, 16),
    (Situation("triton", dtype=FLOAT32, block_size=32, is_invariant=True), InvariantRules, 32),
    (Situation(capability=None, dtype=FLOAT32, is_invariant=True), TorchRules, 16),
]

REFUSED: list[tuple[Situation, str]] = [
    (
        Situation(capability=(7, 5)),
        "dtype is bfloat16, which this device (capability 7.5) does not support; use --dtype float16",
    ),
    (
        Situation("triton", capability=None, dtype=FLOAT32),
        "attention_backend is triton, but it needs a CUDA device; use --attention-backend auto",
    ),
    (
        Situation("flash_attn", capability=None, installed=ALL),
        "attention_backend is flash_attn, but it needs a CUDA device; use --attention-backend auto",
    ),
    (
        Situation("xformers", capability=None, installed=ALL),
        "attention_backend is xformers, but it needs a CUDA device; use --attention-backend auto",
    ),
    (
        Situation("triton", capability=(7, 5), dtype=FLOAT16),
        "attention_backend is triton, but it needs a device with compute capability 8.0 or more, not 7.5; use "
        "--attention-backend torch",
    ),
    (
        Situation("flash_attn", dtype=FLOAT32, installed=FLASH_2),
        "attention_backend is flash_attn, but it supports float16 and bfloat16, not float32; "
        "use --dtype bfloat16 or --attention-backend triton",
    ),
    (
        Situation("flash_attn", capability=(9, 0), dtype=FLOAT32, installed=ALL),
        "attention_backend is flash_attn, but it supports float16 and bfloat16, not float32; "
        "use --dtype bfloat16 or --attention-backend triton",
    ),
    (
        # Neither would the library be there.
        Situation("flash_attn", dtype=FLOAT32),
        "attention_backend is flash_attn, but it supports float16 and bfloat16, not float32; "
        "use --attention-backend triton",
    ),
    (
        Situation("flash_attn"),
        "attention_backend is flash_attn, but the package flash-attn is not installed "
        "(pip install '.[flash-attn]' in a clone); use --attention-backend triton",
    ),
    (
        Situation("flash_attn", installed=InstalledLibraries(flash_attn="2.7.4.post1")),
        "attention_backend is flash_attn, but flash-attn is 2.7.4.post1, and 2.8 or newer is needed "
        "(pip install '.[flash-attn]' in a clone); use --attention-backend triton",
    ),
    (
        Situation("flash_attn", installed=FLASH_2, block_size=16),
        "attention_backend is flash_attn, but version 2 supports block sizes that are multiples of 256 tokens, not 16; "
        "use --block-size-tokens 256 or --attention-backend triton",
    ),
    (
        Situation("flash_attn", installed=FLASH_2, head_dim=320),
        "attention_backend is flash_attn, but it supports a head_dim of up to 256, in steps of 8, not 320; "
        "use --attention-backend torch",
    ),
    (
        Situation("flash_attn", installed=FLASH_2, head_dim=100),
        "attention_backend is flash_attn, but it supports a head_dim of up to 256, in steps of 8, not 100; "
        "use --attention-backend triton",
    ),
    (
        Situation(
            "flash_attn", capability=(9, 0), installed=InstalledLibraries(has_flash_attn_3=True), layers=(ALIBI,)
        ),
        "attention_backend is flash_attn, but version 3 does not support ALiBi, which this model needs; "
        "use --attention-backend triton",
    ),
    *(
        (
            Situation("flash_attn", capability, installed=ALL, layers=(WINDOW, SINKS)),
            "attention_backend is flash_attn, but it does not support attention sinks, which this model needs; "
            "use --attention-backend triton",
        )
        for capability in ((8, 0), (9, 0))
    ),
    *(
        (
            replace(situation, installed=ALL, layers=(PLAIN, BIASES)),
            f"attention_backend is {situation.name}, but it {problem}, which this model needs; "
            "use --attention-backend triton",
        )
        for situation, problem in (
            (Situation("flash_attn"), "does not support distance biases"),
            (Situation("flash_attn", (9, 0)), "does not support distance biases"),
            (Situation("xformers"), "has no distance biases on a paged cache"),
        )
    ),
    *(
        (
            replace(situation, installed=ALL, layers=(PLAIN, READS)),
            f"attention_backend is {situation.name}, but it has no layers that read the cache of an earlier one, "
            "which this model needs; use --attention-backend torch",
        )
        for situation in (
            *(Situation("flash_attn", (8, 0)), Situation("flash_attn", (9, 0))),
            *(Situation("triton"), Situation("xformers")),
        )
    ),
    *(
        (
            replace(situation, installed=ALL, head_dim=576, value_begin=64),
            f"attention_backend is {situation.name}, but it does not support latent caches, which this model needs; "
            "use --attention-backend triton",
        )
        for situation in (Situation("flash_attn"), Situation("flash_attn", (9, 0)), Situation("xformers"))
    ),
    (
        Situation("triton", head_dim=80 + 32, value_begin=80),
        "attention_backend is triton, but it supports latent caches of 16 to 512 numbers behind up to 64 that are "
        "rotated, not 32 behind 80; use --attention-backend torch",
    ),
    (
        Situation("xformers", installed=XFORMERS, layers=(SINKS,)),
        "attention_backend is xformers, but it has no attention sinks on a paged cache, which this model needs; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers"),
        "attention_backend is xformers, but the package xformers is not installed "
        "(pip install '.[xformers]' in a clone); use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=InstalledLibraries(xformers="0.0.29")),
        "attention_backend is xformers, but xformers is 0.0.29, and 0.0.35 or newer is needed "
        "(pip install '.[xformers]' in a clone); use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=InstalledLibraries(xformers="0.0.35", triton="3.8.0")),
        "attention_backend is xformers, but its kernel needs a Triton before 3.8, not 3.8.0; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=XFORMERS, layers=(PLAIN, WINDOW)),
        "attention_backend is xformers, but it has no sliding window on a paged cache, which this model needs; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=XFORMERS, layers=(CAP,)),
        "attention_backend is xformers, but it has no soft cap on a paged cache, which this model needs; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=XFORMERS, layers=(ALIBI,)),
        "attention_backend is xformers, but it has no ALiBi on a paged cache, which this model needs; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=XFORMERS, head_dim=96),
        "attention_backend is xformers, but it supports a head_dim of 16, 32, 64, 128, 256, not 96; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=XFORMERS, dtype=FLOAT32, block_size=96),
        "attention_backend is xformers, but it supports float16 and bfloat16, not float32; "
        "use --attention-backend triton",
    ),
    (
        Situation("xformers", installed=ALL, capability=(9, 0), block_size=300),
        "attention_backend is xformers, but it supports block sizes that are multiples of 64 tokens, not 300; "
        "use --block-size-tokens 64 or --attention-backend flash_attn",
    ),
    *(
        (
            replace(situation, cache_dtype=dtype),
            f"attention_backend is {situation.name}, but it needs a KV cache in the model's dtype, bfloat16, not "
            f"{said}; use --kv-cache-dtype auto or --attention-backend triton",
        )
        for situation, dtype, said in (
            (Situation("flash_attn", capability=(9, 0), installed=ALL), torch.int8, "int8"),
            (Situation("flash_attn", installed=FLASH_2), torch.float8_e4m3fn, "fp8_e4m3"),
            (Situation("xformers", installed=XFORMERS), FLOAT16, "float16"),
        )
    ),
    (
        Situation("flash_attn", capability=(9, 0), installed=ALL, is_invariant=True),
        "numerics is invariant, but attention_backend is flash_attn, whose summation order depends on the batch; "
        "remove --attention-backend",
    ),
    (
        Situation(head_dim=512, is_invariant=True),
        "numerics is invariant, which on a GPU requires Triton attention, but it supports head dimensions of 16 to "
        "256, not 512; remove --numerics",
    ),
]


@each_row(*CHOSEN)
def test_chosen(situation: Situation, rules: type[BackendRules], block_size: int) -> None:
    chosen = situation.choose()

    assert (type(chosen.rules), chosen.block_size) == (rules, block_size)


@each_row(*REFUSED)
def test_refused_in_one_sentence(situation: Situation, sentence: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        situation.choose()

    assert str(caught.value) == sentence


def test_the_reason_says_what_better_ones_lack() -> None:
    assert Situation("torch").choose().reason == "asked for"
    assert Situation(capability=None).choose().reason == "cpu_kernels decides"
    assert Situation(capability=(9, 0), installed=ALL).choose().reason == "the best"
    assert Situation(capability=(9, 0), block_size=24).choose().reason == (
        "not flash_attn: flash-attn 3 (the module flash_attn_interface) is not installed; "
        "not triton: it supports block sizes that are multiples of 16 from 16 to 256, not 24"
    )


def test_the_environment_is_looked_up_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "xformers", raising=False)

    installed = find_installed_libraries()

    assert (installed.xformers, installed.triton) == (version("xformers"), version("triton"))
    assert "xformers" not in sys.modules


def test_a_library_that_was_built_for_another_torch_is_refused() -> None:
    """The installed xformers is such a one: it is built for CUDA 12.8, and its import only warns."""
    built_for_another = replace(XFORMERS, why_not_loaded=why_not_loaded)

    with pytest.raises(ModelLoadError) as caught:
        Situation("xformers", installed=built_for_another).choose()

    assert str(caught.value) == (
        f"attention_backend is xformers, but xformers does not load into torch {torch.__version__} "
        "(libcudart.so.12: cannot open shared object file: No such file or directory); "
        "use --attention-backend triton"
    )


@each_row("flash_attn", "flash_attn_interface")
def test_a_flash_attn_that_does_not_load_is_not_chosen(module: str) -> None:
    """`auto` goes on to the next; by name it is refused with what would work, which is never another broken one."""
    undefined = "undefined symbol: _ZN3c104cuda9SetDeviceEa"
    finder = BrokenModule(module, undefined)
    sys.meta_path.insert(0, finder)
    try:
        installed = InstalledLibraries("2.8.3", module == "flash_attn_interface", None, "3.6.0", why_not_loaded)
        automatic = Situation(capability=(9, 0), installed=installed).choose()
        with pytest.raises(ModelLoadError) as caught:
            Situation("flash_attn", capability=(9, 0), installed=installed).choose()
    finally:
        sys.meta_path.remove(finder)

    assert type(automatic.rules) is TritonRules
    problem = f"{module} does not load into torch {torch.__version__} ({undefined})"
    assert str(caught.value) == f"attention_backend is flash_attn, but {problem}; use --attention-backend triton"
    if module == "flash_attn_interface":
        assert automatic.reason == f"not flash_attn: {problem}"


class BrokenModule(MetaPathFinder):
    """Finds a module whose part in C++ does not fit."""

    def __init__(self, module: str, reason: str) -> None:
        self._module = module
        self._reason = reason

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == self._module:
            raise ImportError(self._reason)


def test_a_library_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    chosen = Situation("flash_attn", capability=(9, 0), installed=ALL).choose()

    with pytest.raises(ModelLoadError, match=r"^attention_backend is flash_attn, but its library cannot be imported"):
        chosen.make()


def test_torch_is_made_on_every_device() -> None:
    assert isinstance(Situation(capability=None).choose().make(), TorchAttentionBackend)


def test_block_sizes_are_the_backend_s_unless_they_are_configured() -> None:
    assert ExecutorConfig(model="any").block_size_tokens is None
    assert FakeConfig().block_size_tokens == 16


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_driver_that_is_too_old_is_named(is_raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        "CUDA initialization: The NVIDIA driver on your system is too old (found version 12020). Please update your "
        "GPU driver by downloading and installing a new version."
    )

    def is_available() -> bool:
        if is_raised:
            raise RuntimeError(message)
        warnings.warn(message, UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    with pytest.raises(ModelLoadError) as caught:
        find_device("cuda", 0)
    assert str(caught.value) == (
        f"the NVIDIA driver is too old for the installed torch {torch.__version__}: it supports CUDA 12.2, and torch "
        "is built for CUDA 13.0; update the driver, or install a torch for CUDA 12.2"
    )


def test_a_rank_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    assert find_device("cuda", 1) == torch.device("cuda", 1)
    with pytest.raises(ModelLoadError, match="rank 2 on this machine needs its own CUDA device; torch finds 2"):
        find_device("cuda", 2)


def test_no_device_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    sentence = r"^the device is cuda, but torch finds no CUDA device( \(.*without CUDA\))?; use --device cpu$"
    with pytest.raises(ModelLoadError, match=sentence):
        find_device("cuda", 0)

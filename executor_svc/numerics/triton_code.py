"""What our kernels for GPUs compute, known without compiling them: by their sources and the release of Triton.

The probe does not run on a GPU: compiling all kernels for its small models would take minutes at each start.
"""

import ast
import hashlib
from importlib.metadata import version
from importlib.resources import files


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

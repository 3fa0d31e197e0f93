"""Which architectures the executor runs, as a Markdown table: tiny random models against plain transformers.

    python -m benchmarks.architectures [ARCHITECTURE ...]

Logits are compared at every position of a prompt, and greedy tokens of prompts that are decoded together, in float32 on
the CPU. The exit code is 1 if an architecture differs.
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from rich.console import Console

from executor_svc.models.transformers_model import TransformersModel
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import (
    ARCHITECTURES,
    compare_with_transformers,
    load_architecture,
    save_tiny_architecture,
)

MAX_LOGIT_DIFFERENCE = 1e-5
MAX_GREEDY_DISTANCE = 1e-4


def table_row(name: str) -> tuple[str, bool]:
    """Return the row of an architecture, and whether it equals transformers."""
    with tempfile.TemporaryDirectory() as directory:
        reference = save_tiny_architecture(Path(directory), name, ARCHITECTURES[name])
        try:
            model, backend = load_architecture(Path(directory))
        except ModelLoadError as error:
            return f"| {name} | refused: {error} | | |", False
        comparison = compare_with_transformers(model, backend, reference)
    code = "transformers" if isinstance(model, TransformersModel) else "family"
    is_equal = comparison.logit_difference < MAX_LOGIT_DIFFERENCE and comparison.greedy_distance < MAX_GREEDY_DISTANCE
    tokens = "equal" if comparison.greedy_distance < MAX_GREEDY_DISTANCE else "differ"
    return f"| {name} | {code} | {comparison.logit_difference:.0e} | {tokens} |", is_equal


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    console.print(
        "| architecture | code | largest difference of a logit, as a part of the largest logit | greedy tokens |"
    )
    console.print("|---|---|---|---|")
    names = sys.argv[1:] or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        sys.exit(f"tests/numerics/architectures.py has no {min(unknown)}")
    num_equal = 0
    for name in names:
        row, is_equal = table_row(name)
        console.print(row)
        num_equal += is_equal
    console.print(f"\n{num_equal} of {len(names)} equal transformers.")
    sys.exit(num_equal < len(names))


if __name__ == "__main__":
    main()

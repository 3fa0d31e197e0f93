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

from executor_svc.models.transformers_model import TransformersModel
from octavo.bench.provenance import markdown_table
from octavo_shared.errors import ModelLoadError
from tests.numerics.architectures import (
    ARCHITECTURES,
    compare_with_transformers,
    load_architecture,
    save_tiny_architecture,
)

MAX_LOGIT_DIFFERENCE = 1e-5
MAX_GREEDY_DISTANCE = 1e-4


def table_row(name: str) -> tuple[list[str], bool]:
    """Return the row of an architecture, and whether it equals transformers."""
    with tempfile.TemporaryDirectory() as directory:
        reference = save_tiny_architecture(Path(directory), name, ARCHITECTURES[name])
        try:
            model, backend = load_architecture(Path(directory))
        except ModelLoadError as error:
            return [name, f"refused: {error}", "", ""], False
        comparison = compare_with_transformers(model, backend, reference)
    code = "transformers" if isinstance(model, TransformersModel) else "family"
    has_same_tokens = comparison.greedy_distance < MAX_GREEDY_DISTANCE
    row = [name, code, f"{comparison.logit_difference:.0e}", "equal" if has_same_tokens else "differ"]
    return row, has_same_tokens and comparison.logit_difference < MAX_LOGIT_DIFFERENCE


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    names = sys.argv[1:] or list(ARCHITECTURES)
    if unknown := set(names) - set(ARCHITECTURES):
        sys.exit(f"tests/numerics/architectures.py has no {min(unknown)}")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}\n")
    rows, are_equal = zip(*map(table_row, names), strict=True)
    difference = "largest difference of a logit, as a part of the largest logit"
    print(markdown_table(["architecture", "code", difference, "greedy tokens"], rows, num_texts=4))
    print(f"\n{sum(are_equal)} of {len(names)} equal transformers.")
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main()

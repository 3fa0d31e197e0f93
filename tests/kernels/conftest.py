"""Where the kernels run: on the CUDA device where there is one, else in Triton's interpreter.

Triton decides when it is imported whether it interprets. pytest reads this file before it imports any test of
this folder, and before it runs any test at all.
"""

import os
import sys

import pytest
import torch

# Triton warns that its default is going to change; the kernels are tested with fused multiply-add.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

if not torch.cuda.is_available():
    language = sys.modules.get("triton.language")
    # Functions of Triton's own that are written in Triton.
    if language is not None and type(language.max).__name__ == "JITFunction":
        raise pytest.UsageError("triton was imported before tests/kernels/conftest.py could ask for its interpreter")
    os.environ["TRITON_INTERPRET"] = "1"
    if os.environ.get("OCTAVO_APPROXIMATE") == "1":
        from tests.kernels.approximation import approximate

        approximate()

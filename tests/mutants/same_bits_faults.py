"""Faults after which a number depends on how the work was cut. None is larger than a rounding."""

from tests.mutants.fault import Fault

CSRC = "executor_svc/native/csrc"
LOGITS = "tests/numerics/test_same_bits.py::test_logits_are_those_of_the_sequence_alone"
LONG_CONTEXTS = "tests/e2e/test_invariance.py::test_outputs_after_contexts_of_2000_tokens_are_those_alone"

FAULTS = (
    Fault(
        "threads that share a long context add its parts from the last one on",
        f"{CSRC}/attention.c",
        "for (long index = 1; index < tile->num_partials; index++) {",
        "for (long index = tile->num_partials - 1; index > 0; index--) {",
        (LONG_CONTEXTS,),
    ),
    Fault(
        "a block of keys begins where the window of its tile does",
        f"{CSRC}/attention.c",
        "for (long begin = part * PART_KEYS;",
        "for (long begin = most(lower, part * PART_KEYS);",
        (LOGITS,),
    ),
    Fault(
        "a single token adds the sums of a score in another order than a chunk",
        f"{CSRC}/attention_direct.h",
        "vf_add(vf_add(vf_add(chains[0], chains[1]), chains[2]), chains[3])",
        "vf_add(vf_add(chains[0], chains[1]), vf_add(chains[2], chains[3]))",
        (LOGITS,),
    ),
    Fault(
        "a chunk rounds the older values once more than a single token does",
        f"{CSRC}/attention_packed.h",
        "vf_fma(vf_load(p), vf_all(shrink[i]), sum[i][v])",
        "vf_add(vf_mul(vf_load(p), vf_all(shrink[i])), sum[i][v])",
        (LOGITS,),
    ),
    Fault(
        "a row that is alone in its tile is multiplied without fused multiply-add",
        f"{CSRC}/tile.h",
        "for (int j = 0; j < vectors; j++) sum[i][j] = vf_accumulate(sum[i][j], value, column[j]);",
        "for (int j = 0; j < vectors; j++)\n"
        "                    sum[i][j] = rows > 1 ? vf_accumulate(sum[i][j], value, column[j])\n"
        "                                         : vf_add(vf_mul(value, column[j]), sum[i][j]);",
        (LOGITS,),
    ),
    Fault(
        "a row that a thread has for itself is rounded to int8 by another scale",
        f"{CSRC}/rows.c",
        "if (rows->format == INT16_CODES) quantize_to_int16(rows, row, num_values, values + row * value_stride);",
        "if (rows->format == INT16_CODES) {\n"
        "            quantize_to_int16(rows, row, num_values, values + row * value_stride);\n"
        "            if (end - begin == 1) rows->scales[row] *= 1.0001f;\n"
        "        }",
        (LOGITS,),
    ),
    Fault(
        "odd rows of a step add the outputs of their experts in another order",
        f"{CSRC}/experts.c",
        "vf_fma(vf_all(weights[j]), vf_load_part(scratch->outputs + places[j] * size + i, size - i), sum)",
        "vf_fma(vf_all(weights[j ^ (row & 1)]),\n"
        "                         vf_load_part(scratch->outputs + places[j ^ (row & 1)] * size + i, size - i), sum)",
        (LOGITS,),
    ),
)

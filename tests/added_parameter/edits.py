"""What somebody edits by hand to add a sampling parameter: here `epsilon_cutoff`, a filter.

It drops tokens whose probability is below it, of what the filters before it left; 0: none. These are all the edits,
as texts that stand in the files and what replaces them.
"""

from tests.mutants.fault import Change

NAME = "epsilon_cutoff"

_FILTERS = "executor_svc/sampler/filters.py"
_C = "executor_svc/native/csrc/sampling.c"
_TRITON = "executor_svc/triton_kernels/sampling.py"


def _before(path: str, text: str, added: str) -> Change:
    return Change(f"before {text.strip()}", path, text, added + text)


def _after(path: str, text: str, added: str) -> Change:
    return Change(f"after {text.strip()}", path, text, text + added)


def _instead(path: str, text: str, new: str) -> Change:
    return Change(f"in place of {text.strip()}", path, text, new)


EDITS = (
    _after(
        "protos/octavo/generation/v1/generation.proto",
        "  optional uint32 prompt_logprobs = 28;\n",
        "  // Drop tokens whose probability is below this. Range 0 to 1. Absent: 0, none.\n"
        "  optional float epsilon_cutoff = 100;\n",
    ),
    _before(
        "octavo/values/sampling_params_table.py",
        '    SamplingParam(\n        name="repetition_penalty",\n',
        "    SamplingParam(\n"
        '        name="epsilon_cutoff",\n'
        "        kind=Kind.FLOAT,\n"
        '        doc="Drop tokens whose probability is below this.",\n'
        "        high=1,\n"
        "        wire_number=100,\n"
        "        stage=Stage.FILTER,\n"
        "        may_model_set=True,\n"
        "    ),\n",
    ),
    # In torch: over all tokens, and over the likeliest ones.
    _after(
        _FILTERS,
        '        ("typical_p", sampling["typical_p"] < 1, _keep_typical),\n',
        '        ("epsilon_cutoff", sampling["epsilon_cutoff"] > 0, _keep_probable),\n',
    ),
    _before(
        _FILTERS,
        "    weights = (values - values[:, :1]).exp_().masked_fill_(~keeps, 0.0)\n    return Survivors",
        "    probs = values.masked_fill(~keeps, -torch.inf).softmax(-1)\n"
        '    epsilon = _column(sampling["epsilon_cutoff"], device)\n'
        "    keeps &= (probs >= epsilon) | (probs == probs.amax(-1, keepdim=True))\n",
    ),
    _before(
        _FILTERS,
        "def _cut_below(",
        "def _keep_probable(scores: torch.Tensor, epsilon: torch.Tensor) -> None:\n"
        '    """Keep what is at least so likely, and the likeliest."""\n'
        "    probs = scores.softmax(-1)\n"
        "    scores.masked_fill_((probs < epsilon) & (probs < probs.amax(-1, keepdim=True)), -torch.inf)\n\n\n",
    ),
    # In C.
    _after(_C, "    float typical_p;    // 1: off\n", "    float epsilon_cutoff;  // 0: off\n"),
    _instead(
        _C,
        "    if (!limits_number && !has_nucleus && !has_least && !is_typical) {\n",
        "    bool is_probable = how->epsilon_cutoff > 0.0f;\n"
        "    if (!limits_number && !has_nucleus && !has_least && !is_typical && !is_probable) {\n",
    ),
    _before(
        _C,
        "    if (!scratch->num_candidates) return NOT_FINITE;",
        "    if (is_probable) {\n"
        "        mass = weigh_candidates(scratch, top);\n"
        "        keep(scratch, scratch->keys, top + fminf(0.0f, (float)log(how->epsilon_cutoff * mass.total)));\n"
        "    }\n",
    ),
    # In Triton.
    _before(
        _TRITON,
        "    return _drawn(row, (top, least, log_total, entropy, farthest), tl.load(choice + 3), TILE)\n",
        "    epsilon = tl.load(numbers + 4).to(tl.float32)\n"
        "    if epsilon > 0.0:\n"
        "        mass = _mass_left(row, (top, least, log_total, entropy, farthest), TILE)\n"
        "        share = tl.log(epsilon.to(tl.float64) * mass.to(tl.float64) / UNITS)\n"
        "        least = tl.maximum(least, top + tl.minimum(share, 0.0).to(tl.float32))\n",
    ),
)

EDITED_FILES = frozenset(edit.path for edit in EDITS)

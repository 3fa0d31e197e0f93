"""What of the sampler an output depends on, beside the kernels: `numerics_id` covers it.

What covers what: the build key of the C library covers all of its code (`executor_svc/native/build.py`); here are the
order of the processors and filters, from their table, and `REVISION` for what NumPy does: draws and token rules.
"""

from shared.sampling_parameters import Stage, of_stage

# Raise it with each change of `sample_rows.py` that changes a draw, or which tokens a rule names.
REVISION = 1


def sampler_revision() -> tuple[str, ...]:
    """Return it; equal ones and equal kernels give equal tokens."""
    stages = (Stage.PROCESSOR, Stage.FILTER, Stage.DRAW)
    names = tuple(f"{stage.name.lower()}:{parameter.name}" for stage in stages for parameter in of_stage(stage))
    return (f"sampler:{REVISION}", *names)

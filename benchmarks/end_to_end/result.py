"""The file of a run: machine, engines, limits, and every single measurement. Its schema is checked when it is read."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from octavo.bench.provenance import Machine

SCHEMA_VERSION = 1
RESULTS = Path(__file__).parents[1] / "results"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Record):
    """What the machine could do, measured between the engines' turns; all samples, in order."""

    read_gb_per_s: list[float]
    fma_gflop_per_s: list[float]
    gemm_gflop_per_s: list[float]


class Model(_Record):
    """What was served."""

    name: str
    num_parameters: int
    vocab_size: int
    prefill_flops: int = Field(description="Of one token of a prompt, without attention and output head.")
    head_flops: int
    attention_flops: int = Field(description="Of one token for each token before it.")


class EngineRecord(_Record):
    """An engine that ran."""

    name: str
    product: str
    number_format: str
    number_class: str
    versions: dict[str, str]
    settings: dict[str, str]
    weight_bytes: int
    start_s: float


class RunRecord(_Record):
    """One engine, one workload, one round."""

    engine: str
    workload: str
    round: int
    seconds: float = Field(gt=0)
    first_token_s: list[float]
    output_tokens: int = Field(ge=1)
    foreign_share: float = Field(description="Of all cores, what others than the engine took.")
    idle_engines_s: float
    is_spoiled: bool


class Result(_Record):
    """A whole run."""

    schema_version: int = SCHEMA_VERSION
    date: str = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")
    commit: str
    command: str
    minutes: float
    machine: Machine
    num_threads: int
    python: str
    model: Model
    limits: Limits
    engines: list[EngineRecord]
    missing: dict[str, str] = Field(description="Engines that did not run, with the reason.")
    runs: list[RunRecord]


def write_result(result: Result, path: Path) -> None:
    """Write a file that `read_result` takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_result(path: Path) -> Result:
    """Read a file.

    Raises:
        pydantic.ValidationError: it is none, or of another version of the schema.
    """
    return Result.model_validate_json(path.read_text(encoding="utf-8"))


def joined(earlier: Result, later: Result) -> Result:
    """Return a result with another piece of it.

    Raises:
        ValueError: they are not of one commit, machine and model; one sentence.
    """
    for what in ("commit", "machine", "model", "num_threads", "python"):
        before, now = getattr(earlier, what), getattr(later, what)
        if before != now:
            raise ValueError(f"the result is of another {what.replace('_', ' of ')}, {before}, and this is {now}")
    names, new = ({engine.name for engine in piece.engines} for piece in (earlier, later))
    missing = {name: why for name, why in earlier.missing.items() if name in names or name not in new}
    missing |= {name: why for name, why in later.missing.items() if name in new or name not in names}
    lists = {name: getattr(earlier.limits, name) + getattr(later.limits, name) for name in Limits.model_fields}
    changes = {
        "command": f"{earlier.command}; {later.command}",
        "minutes": round(earlier.minutes + later.minutes, 1),
        "limits": Limits(**lists),
        "engines": [*earlier.engines, *(engine for engine in later.engines if engine.name not in names)],
        "missing": missing,
        "runs": [*earlier.runs, *later.runs],
    }
    return earlier.model_copy(update=changes)


def result_name(result: Result) -> str:
    return f"{result.date}-{result.machine.kind}.json"


def last_result(folder: Path = RESULTS) -> Path | None:
    """Return the newest file of a folder, by its name; None: there is none."""
    return max(folder.glob("[0-9]*.json"), default=None)

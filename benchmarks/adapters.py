"""What LoRA adapters cost: `python -m benchmarks.adapters [SCENARIO ...]`, decode steps of a worker without RPC.

The base model without slots for adapters, the base model beside slots, and rows with adapters take turns. Adapters are
of random numbers, on all linear layers. One thread, unless told otherwise: CPU times are then not of waits.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.costs.harness import Figures, Groups, Line, Scenario, Size, Way, about, in_turn, run_scenario
from benchmarks.costs.workers import Decoding, decode_tokens, new_worker, title
from octavo.bench.provenance import markdown_table, provenance

BASE, BESIDE, WITH = "without slots", "beside slots", "with adapters"
CONTEXT: Final = 64
WARM_UP: Final = 10  # steps
STEP, CPU = "a step, ms", "CPU of a step, ms"
BATCH, STREAM = "batch", "stream"

# The most CPU time of a step over that without slots, of weights in float32.
TARGETS: Final = {(BATCH, WITH): 1 / 0.8, (STREAM, WITH): 1 / 0.9, (BATCH, BESIDE): 1.02, (STREAM, BESIDE): 1.02}


@dataclass(frozen=True, slots=True)
class Load:
    """Rows that decode, and the steps of a turn."""

    num_rows: int
    num_adapters: int
    num_steps: int


LOADS: Final = {BATCH: Load(64, 8, 10), STREAM: Load(1, 1, 40)}


def scenarios(rank: int, num_threads: int, num_pairs: int) -> dict[str, Scenario]:
    """Return the scenarios by name."""
    return {
        name: Scenario(
            name, f"{load.num_rows} rows with adapters", partial(groups, load, rank, num_threads, num_pairs), num_pairs
        )
        for name, load in LOADS.items()
    }


async def groups(load: Load, rank: int, num_threads: int, num_pairs: int, size: Size) -> Groups:
    """All ways of one number format decode side by side, so a pair has the same contexts."""
    num_rows, num_steps = size.of(load.num_rows, load.num_adapters), size.of(load.num_steps, 2)
    with tempfile.TemporaryDirectory(prefix="octavo-adapters-") as folder:
        names = [str(seed) for seed in range(load.num_adapters)]
        for seed, name in enumerate(names):
            write_adapter(Path(folder) / name, size.directory(), rank, seed)
        most_steps = WARM_UP + num_pairs * num_steps
        num_tokens = decode_tokens(num_rows, CONTEXT, most_steps)
        for number_format in size.of(("none", "int4"), ("none",)):
            ways, base = [], f"{title(number_format)}, {BASE}"
            for way, has_slots, adapters in ((BASE, False, []), (BESIDE, True, []), (WITH, True, names)):
                lora_dir = Path(folder) if has_slots else None
                worker = new_worker(
                    size.directory(), number_format, num_threads, num_tokens, num_rows, lora_dir=lora_dir
                )
                decoding = Decoding(worker, num_rows, CONTEXT, most_steps, adapters)
                turn(decoding, WARM_UP)
                name = f"{title(number_format)}, {way}"
                ways.append(Way(name, in_turn(turn, decoding, num_steps), "" if way == BASE else base))
            yield ways


def turn(decoding: Decoding, num_steps: int) -> Figures:
    """Return the time of a step, and the CPU time of all threads, waits for each other included."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        decoding.step()
    took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {STEP: 1000 * took_s / num_steps, CPU: 1000 * took_cpu_s / num_steps}


def write_adapter(directory: Path, model: Path, rank: int, seed: int) -> None:
    """Write an adapter on all linear layers of a model, which are named `*_proj`."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if not name.endswith("_proj.weight"):
                    continue
                num_outputs, num_inputs = file.get_slice(name).get_shape()
                for half, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                    key = f"base_model.model.{name.removesuffix('.weight')}.lora_{half}.weight"
                    tensors[key] = torch.randn(shape, generator=generator) * 0.01
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, directory / "adapter_model.safetensors")


def target_of(line: Line) -> str:
    """Return the target of a figure, and whether the median of its ratios meets it."""
    number_format, _, way = line.way.partition(", ")
    target = TARGETS.get((line.scenario, way))
    if target is None or number_format != title("none") or line.figure != CPU:
        return ""
    ratios = [value / other for value, other in zip(line.values, line.others, strict=True)]
    return f"ratio ≤ {target:.3g}: {'met' if statistics.median(ratios) <= target else 'missed'}"


def main(arguments: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description="What LoRA adapters cost.")
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="batch, stream (default: both)")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of the executor (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=11, help="turns of each way (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="Hugging Face directory (default: the demo model in float32)")
    parser.add_argument("--smallest", action="store_true", help="so small that figures mean nothing, to try it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the value of every turn there as well")
    options = parser.parse_args(given)
    num_pairs = 1 if options.smallest else options.pairs
    known = scenarios(options.rank, options.threads, num_pairs)
    if unknown := set(options.scenarios) - set(known):
        parser.error(f"there is no scenario {min(unknown)}; there are {', '.join(known)}")
    lines: list[Line] = []
    for name in options.scenarios or known:
        size = Size(options.smallest, options.model)
        say = partial(print, file=sys.stderr)
        lines += asyncio.run(run_scenario(known[name], size, num_pairs, say=say))
    made = provenance("python", "-m", "benchmarks.adapters", *given)
    heading = ["scenario", "way", "figure", "median (interval)", "ratio (interval)", "target"]
    print(markdown_table(heading, ([*line.cells(), target_of(line)] for line in lines), num_texts=3))
    print(f"\n{about(made)}")
    if options.json is not None:
        options.json.write_text(made.json({"rows": [asdict(line) for line in lines]}), encoding="utf-8")


if __name__ == "__main__":
    main()

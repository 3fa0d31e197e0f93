"""From runs to figures, tables and pages."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from benchmarks.end_to_end.engines import ROOT, workload_flops
from benchmarks.end_to_end.pages import SECTIONS, Section, save_plot
from benchmarks.end_to_end.result import RESULTS, Limits, joined, last_result, read_result, result_name, write_result
from benchmarks.end_to_end.tables import comparison, figure_of, limits_line, machine_line, rate, rows
from benchmarks.end_to_end.workloads import Shape, Workload, by_name
from tests.unit.benchmarks.end_to_end.results import MACHINE, MODEL, engine, result, run

OURS, FAST, SLOW = engine("Octavo", "none"), engine("vLLM", "float32", "float32"), engine("OpenVINO", "x", "float32")


@pytest.mark.parametrize(("workload", "expected"), [("W1", 100 / 1.5), ("W2", 101 / 2.0), ("P512", 500.0)])
def test_one_stream_is_judged_by_its_decoding_many_by_the_whole_run_a_prompt_by_its_first_token(
    workload: str, expected: float
) -> None:
    assert rate(run("a", workload, 2.0, first_token_s=[0.5]), by_name(workload)) == pytest.approx(expected)


def test_a_figure_is_the_median_of_the_undisturbed_runs() -> None:
    disturbed = run(OURS.name, "W2", 100.0, is_spoiled=True)
    times = [run(OURS.name, "W2", seconds) for seconds in (1.0, 2.0, 4.0)]
    figure = figure_of(result([OURS], [disturbed, *times]), OURS, by_name("W2"))
    assert figure is not None
    assert (figure.median, figure.low, figure.high, figure.num_runs) == (50.5, 25.25, 101.0, 3)
    assert not figure.is_spoiled
    alone = figure_of(result([OURS], [disturbed]), OURS, by_name("W2"))
    assert alone is not None
    assert alone.is_spoiled
    assert figure_of(result([OURS], times), OURS, by_name("W1")) is None


def test_one_stream_is_compared_with_the_bandwidth_and_the_rest_with_the_peak() -> None:
    first, second = by_name("W1"), by_name("W2")
    made = result([OURS], [run(OURS.name, "W1", 2.0), run(OURS.name, "W2", 2.0, output_tokens=second.output_tokens)])
    of_one, of_many = (figure_of(made, OURS, workload) for workload in (first, second))
    assert of_one is not None
    assert of_many is not None
    assert of_one.limit_share == pytest.approx(1_000_000 * 100 / 10e9)
    assert of_many.limit_share == pytest.approx(workload_flops(MODEL, second) / 2.0 / 100e9)
    unknown = Limits(read_gb_per_s=[], fma_gflop_per_s=[], gemm_gflop_per_s=[])
    without = figure_of(made.model_copy(update={"limits": unknown}), OURS, first)
    assert without is not None
    assert without.limit_share is None


def test_a_workload_costs_its_tokens_its_attention_and_a_shared_prefix_once() -> None:
    model = MODEL.model_copy(update={"attention_flops": 1})
    workload = Workload("w", "", (Shape(4, 2, 3),) * 2)
    first = 5 * 1000 + 2 * 100 + (1 + 2 + 3 + 4 + 5)
    second = 2 * 1000 + 2 * 100 + (4 + 5)
    assert workload_flops(model, workload) == first + second


def test_the_table_has_our_best_beside_every_peer_and_names_the_best_peer() -> None:
    engines = [OURS, engine("Octavo", "int8"), engine("Octavo", "int8-a8"), FAST, SLOW]
    seconds = {"none": 2.0, "int8": 4.0, "int8-a8": 1.0, "float32": 1.6, "x": 4.0}
    runs = [run(one.name, "W1", seconds[one.number_format]) for one in engines]
    runs += [run(OURS.name, "P512", 0.1), run(FAST.name, "P512", 0.2), run(SLOW.name, "P512", 0.4, is_spoiled=True)]
    made = result(engines, runs)
    assert [(row.workload.name, row.number_class) for row in rows(made)] == [
        ("W1", "float32"),
        ("W1", "8 bits"),
        ("P512", "float32"),
    ]
    header, _, first, second, third = comparison(made).splitlines()
    assert header == "|  | Octavo | OpenVINO | vLLM | Octavo / best peer | of the limit |"
    assert first == "| W1 float32 | 100 | 50.0 | **125** | 0.80 | 1 % |"
    assert second == "| W1 8 bits | 200 (int8-a8) | – | – | – | 2 % |"
    assert third.startswith("| P512 float32, ms | 50.0 | 200* | **100** | 0.50 | ")


def test_a_line_names_machine_versions_and_limits() -> None:
    made = result([OURS, FAST], [run(OURS.name, "W1", 2.0)])
    assert machine_line(made) == ("A CPU (AVX2), 2 cores, 24 GiB, 2 threads each, vllm 1.0, Python 3.11.7, 2026-11-22.")
    assert limits_line(made) == (
        "Measured in the same run: 9 to 10 GB/s read from memory, 90 to 100 GFLOP/s of float32 multiply-adds."
    )


def test_a_result_is_read_as_it_was_written_and_a_field_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    made = result([OURS], [run(OURS.name, "W1", 2.0)])
    path = tmp_path / result_name(made)
    assert path.name == "2026-11-22-a-cpu-2-cores.json"
    write_result(made, path)
    assert read_result(path) == made
    assert last_result(tmp_path) == path
    path.write_text(path.read_text(encoding="utf-8").replace('"num_threads"', '"host_name"'), encoding="utf-8")
    with pytest.raises(ValidationError, match="host_name"):
        read_result(path)


def test_a_piece_is_joined_to_a_result_of_the_same_commit_and_machine_only() -> None:
    first = result([OURS], [run(OURS.name, "W1", 2.0)], missing={FAST.name: "no time", SLOW.name: "no file"})
    second = result([OURS, FAST], [run(FAST.name, "W1", 3.0)], missing={FAST.name: "failed at W2"})
    whole = joined(first, second)
    assert (whole.engines, whole.runs) == ([OURS, FAST], [*first.runs, *second.runs])
    assert whole.missing == {FAST.name: "failed at W2", SLOW.name: "no file"}
    assert (whole.minutes, whole.limits.read_gb_per_s) == (2.0, [9.0, 10.0] * 2)
    with pytest.raises(ValueError, match="the result is of another commit, abc, and this is def"):
        joined(first, result([OURS], [], commit="def"))
    with pytest.raises(ValueError, match="the result is of another machine"):
        joined(first, result([OURS], [], machine=replace(MACHINE, cores=4)))


def test_the_picture_is_the_same_for_the_same_result(tmp_path: Path) -> None:
    made = result([OURS, FAST], [run(one.name, w, 2.0) for one in (OURS, FAST) for w in ("W1", "P512")])
    for name in ("a.svg", "b.svg"):
        save_plot(made, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    words = {element.text for element in ElementTree.parse(tmp_path / "a.svg").iter() if element.text}
    assert {"Octavo", "vLLM", "float32", "100"} <= words


def test_only_what_is_between_the_markers_of_a_page_changes() -> None:
    section = Section("PAGE.md", "some", lambda: "new")
    begin, end = section.markers
    page = f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n"
    assert section.insert_into(page) == page.replace("old", "new")
    with pytest.raises(ValueError, match="the page has no <!-- begin: some"):
        section.insert_into(end + begin)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.page} {section.name}")
def test_the_pages_quote_the_last_results(section: Section) -> None:
    text = (ROOT / section.page).read_text(encoding="utf-8")
    assert section.insert_into(text) == text, "run make bench-pages"


def test_the_table_of_the_front_page_has_at_most_fourteen_rows() -> None:
    rows_of_page = re.findall(r"^\| [WP]\d+ ", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 1 <= len(rows_of_page) <= 14


@pytest.mark.parametrize("path", sorted(RESULTS.glob("[0-9]*.json")), ids=lambda path: path.name)
def test_a_committed_result_is_whole_and_tells_nothing_of_the_machine_but_its_kind(path: Path) -> None:
    committed = read_result(path)
    assert path.name == result_name(committed)
    assert "/" not in committed.command
    ran = {record.engine for record in committed.runs}
    assert ran <= {record.name for record in committed.engines}
    assert all(record.output_tokens == by_name(record.workload).output_tokens for record in committed.runs)

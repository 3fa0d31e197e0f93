"""The tables of docs/metrics.md, from the definitions in the code."""

import re
from pathlib import Path

from executor_svc.service.metrics import METRICS as EXECUTOR_METRICS
from octavo_shared.grpc.grpc_metrics import METRICS as SERVICE_METRICS
from octavo_shared.process.metric import docs_table
from scheduler_svc.front.api_meter import METRICS as API_METRICS
from scheduler_svc.front.grammars.grammar_checks import METRICS as GRAMMAR_METRICS
from scheduler_svc.front.openai.routing import METRICS as HTTP_METRICS
from scheduler_svc.front.text.text_threads import METRICS as TEXT_METRICS
from scheduler_svc.link.cell import METRICS as CELL_METRICS
from scheduler_svc.telemetry.metrics import METRICS as SCHEDULER_METRICS
from scheduler_svc.telemetry.vllm_metrics import METRICS as VLLM_METRICS

PAGE = Path(__file__).parents[1] / "metrics.md"

_TABLES = {
    "scheduler": docs_table(
        (*SCHEDULER_METRICS, *API_METRICS, *TEXT_METRICS, *GRAMMAR_METRICS, *HTTP_METRICS, *CELL_METRICS)
    ),
    "executor": docs_table(EXECUTOR_METRICS),
    "both": docs_table(SERVICE_METRICS),
    "aliases": docs_table(VLLM_METRICS),
}


def with_tables(page: str) -> str:
    """Return the page with its tables, each between two comments, as the code has them."""
    for name, table in _TABLES.items():
        begin, end = f"<!-- table {name} -->", "<!-- end -->"
        found = re.search(f"{begin}.*?{end}", page, re.DOTALL)
        assert found, f"the page has no place for the table {name!r}"
        page = f"{page[: found.start()]}{begin}\n{table}\n{end}{page[found.end() :]}"
    return page

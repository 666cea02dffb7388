"""Long lists of workloads: summaries for a table, and the whole workloads only where a document shows them.

A table of ten thousand jobs needs a few values of each, so summaries are asked for. JSON and YAML keep every field: then
whole workloads are read, and the summaries made of them here, so that a column, --sort and --filter are the same in both.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from eelgrid_controller.cli.connection import CliSettings, iterate_pages
from eelgrid_protos.messages import (
    PAGE_SIZE_MOST,
    SUMMARY_PAGE_SIZE_MOST,
    ListWorkloadsRequest,
    Workload,
    WorkloadSummary,
    WorkloadView,
    summarize_workload,
)
from eelgrid_protos.plain_messages import to_plain


def iterate_summaries(
    client: Any, request: ListWorkloadsRequest, *, timeout_s: float, is_brief: bool = False
) -> Iterator[WorkloadSummary]:
    """Yields the summaries of workloads that a request matches; in smaller pages for a caller that reads the first few."""
    return iterate_pages(
        client.list_workloads,
        replace(request, view=WorkloadView.SUMMARY),
        "rows",
        timeout_s=timeout_s,
        page_size_most=PAGE_SIZE_MOST if is_brief else SUMMARY_PAGE_SIZE_MOST,
    )


class WorkloadListing:
    """The workloads of one command: rows for its columns, and each row's workload for a document."""

    def __init__(self, client: Any, settings: CliSettings) -> None:
        self._client, self._settings = client, settings
        self._whole: dict[str, Workload] = {}

    def iterate_rows(self, request: ListWorkloadsRequest, *, is_brief: bool = False) -> Iterator[WorkloadSummary]:
        """Yields the summaries of workloads that a request matches, in the order of their submission."""
        timeout_s = self._settings.timeout_s
        if self._settings.output not in {"json", "yaml"}:
            yield from iterate_summaries(self._client, request, timeout_s=timeout_s, is_brief=is_brief)
            return
        for one in iterate_pages(self._client.list_workloads, request, "workloads", timeout_s=timeout_s):
            self._whole[one.workload_id] = one
            yield summarize_workload(one, progress=one.progress, queue_position=one.queue_position)

    def to_plain(self, row: WorkloadSummary) -> dict[str, Any]:
        """Returns the plain form of a row's whole workload; only where the output is a document."""
        return to_plain(self._whole[row.workload_id])

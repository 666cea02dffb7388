"""The calls about energy of the operators' service in memory: they say what a test put there."""

from dataclasses import dataclass, field, replace
from typing import Any

from eelgrid_protos import messages
from eelgrid_protos.faults import NotFound
from eelgrid_protos.messages import EnergySpent

__all__ = ["NOTHING_SPENT", "FakeEnergy"]

NOTHING_SPENT = messages.QueryEnergyResponse(
    begin_ns=0, end_ns=0, left_out=EnergySpent(), unallocated=EnergySpent(), unattributed=EnergySpent()
)


@dataclass
class FakeEnergy:
    """Has what was asked for, too; a failure is raised instead of an answer. It confirms whatever it is told."""

    answer: messages.QueryEnergyResponse = NOTHING_SPENT
    asked: list[messages.QueryEnergyRequest] = field(default_factory=list)
    failure: Exception | None = None
    exporters: dict[str, messages.EnergyExporter] = field(default_factory=dict)
    confirmed: list[messages.ConfirmEnergyExportRequest] = field(default_factory=list)
    settled_ns: int = 0

    async def query_energy(self, request: Any, context: Any) -> messages.QueryEnergyResponse:
        self.asked.append(request)
        if self.failure is not None:
            raise self.failure
        return replace(self.answer, begin_ns=request.begin_ns, end_ns=request.end_ns)

    async def query_energy_report(self, request: Any, context: Any) -> messages.QueryEnergyReportResponse:
        if self.failure is not None:
            raise self.failure
        answer = replace(self.answer, begin_ns=request.begin_ns, end_ns=request.end_ns)
        return messages.QueryEnergyReportResponse(answers=tuple(answer for _ in request.groupings))

    async def confirm_energy_export(self, request: Any, context: Any) -> messages.ConfirmEnergyExportResponse:
        self.confirmed.append(request)
        before = self.exporters.get(request.name)
        self.exporters[request.name] = messages.EnergyExporter(
            name=request.name, since_ns=before.since_ns if before else request.begin_ns, until_ns=request.end_ns
        )
        return messages.ConfirmEnergyExportResponse(exporter=self.exporters[request.name])

    async def list_energy_exporters(self, request: Any, context: Any) -> messages.ListEnergyExportersResponse:
        return messages.ListEnergyExportersResponse(
            exporters=tuple(self.exporters.values()), settled_ns=self.settled_ns
        )

    async def remove_energy_exporter(self, request: Any, context: Any) -> messages.RemoveEnergyExporterResponse:
        if self.exporters.pop(request.name, None) is None:
            raise NotFound(f"no exporter {request.name}")
        return messages.RemoveEnergyExporterResponse()

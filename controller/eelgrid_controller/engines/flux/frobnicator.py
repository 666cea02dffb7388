"""Frobnicator plugin for Flux: writes into a jobspec where Eelgrid would place the job, as a constraint.

The soft way, for an instance with a scheduler of Flux's own. Loaded by job-ingest; see the how-to page. Owns what is added to
a jobspec. Never fails a submission: without an answer in time the jobspec stays as it is.

A job names its nodes, or opts out, by the attributes `system.constraints` with a host list or ranks, or
`system.eelgrid` = false: it is left alone.

Source: `flux.job.frobnicator` of flux-core, RFC 31.
"""

import json
import logging
import os
from typing import Any

from flux.job.frobnicator import FrobnicatorPlugin

from eelgrid_controller.engines.flux.broker_link import name_user, reduce_jobspec
from eelgrid_protos.errors import ContractError
from eelgrid_protos.faults import Fault
from eelgrid_protos.messages import AdviseFluxRequest
from eelgrid_protos.operator_calls import CONTROLLER_VARIABLE, DEFAULT_CONTROLLER
from eelgrid_protos.rpc import FLUX_SERVICE, build_client
from eelgrid_protos.transport import open_blocking_channel

_WITHIN_S = 2.0
_LOG = logging.getLogger("eelgrid.frobnicator")


def names_nodes(constraint: Any) -> bool:
    """Whether a constraint names nodes anywhere."""
    if isinstance(constraint, dict):
        return any(key in ("hostlist", "ranks") or names_nodes(value) for key, value in constraint.items())
    return isinstance(constraint, list) and any(map(names_nodes, constraint))


def join_constraints(own: Any, advised: dict[str, Any]) -> dict[str, Any]:
    """Returns what both demand."""
    return {"and": [own, advised]} if own else advised


class Frobnicator(FrobnicatorPlugin):
    """Asks the controller for each job."""

    def configure(self, args: Any, config: dict[str, Any]) -> None:
        """Connects; the controller is named by `[eelgrid] controller` in Flux's configuration, or by the environment."""
        del args
        address = (config.get("eelgrid") or {}).get("controller") or os.environ.get(CONTROLLER_VARIABLE)
        channel = open_blocking_channel(str(address or DEFAULT_CONTROLLER), tls=None)
        self._advise = build_client(FLUX_SERVICE, channel).advise_flux

    def frob(self, jobspec: Any, userid: int, urgency: int, flags: int) -> None:
        """Adds a constraint to a jobspec."""
        del urgency, flags
        found = jobspec.jobspec
        system = (found.get("attributes") or {}).get("system") or {}
        own = system.get("constraints")
        if system.get("eelgrid") is False or names_nodes(own):
            return
        request = AdviseFluxRequest(jobspec=json.dumps(reduce_jobspec(found)), user=name_user(userid))
        try:
            answer = self._advise(request, timeout=_WITHIN_S)
        except (Fault, ContractError) as error:
            _LOG.warning("advice=none error=%s", error)
            return
        if answer.constraint:
            jobspec.setattr("system.constraints", join_constraints(own, json.loads(answer.constraint)))

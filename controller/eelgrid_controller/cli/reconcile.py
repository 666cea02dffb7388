"""eelctl reconcile: nodes that hold more than the journal knows are placed on again.

Owns the command. What a node holds beyond the journal, and what is done meanwhile, is rollback.py's.
"""

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import document
from eelgrid_protos.messages import ReconcileNodeRequest

__all__ = ["reconcile"]


@click.command()
@click.argument("node", nargs=-1, required=True)
@printing
@click.pass_obj
def reconcile(settings: Settings, node: tuple[str, ...]) -> None:
    """Give up what nodes hold beyond the journal, after it lost entries.

    Their next plan is without that work, and its GPUs are free for other work. See first what runs there: `eelctl
    doctor` and `eelctl nodes -o json` (unknown_workload_ids) name it. Stop it, or submit it again afterwards.
    """
    with operators(settings) as client:
        for name in node:
            found = client.reconcile_node(ReconcileNodeRequest(node_name=name), timeout=settings.timeout_s).node
            document(settings, found, [f"{name}: nothing beyond the journal, plan {found.plan_epoch}"])

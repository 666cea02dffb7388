"""eelctl node: one node of the cluster, where it is gone for good.

Owns the options and what a person is told. Must not know what becomes of the work: the controller does.
"""

from collections.abc import Iterator

import click

from eelgrid_controller.cli.connection import operators
from eelgrid_controller.cli.settings import Settings, printing
from eelgrid_controller.cli.tables import document
from eelgrid_protos.messages import RemoveNodeRequest, RemoveNodeResponse

__all__ = ["node"]

_SHOWN_MOST = 10


@click.group()
def node() -> None:
    """Remove a node that is gone for good; `eelctl nodes` lists them."""


@node.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Also where it holds work, which ends, or where its agent is connected.")
@click.option("--dry-run", is_flag=True, help="Say what would become of its work, and change nothing.")
@printing
@click.pass_obj
def remove(settings: Settings, name: str, *, force: bool, dry_run: bool) -> None:
    """Forget a node; needs the role admin.

    Without --force a node that holds work or whose agent is connected stays. With it, services go on with the replicas
    that they have elsewhere, and every other workload with a replica there ends. Where an agent still runs, stop it
    first: it would register the node anew, and what runs there runs on until the lease of its plan ends.
    """
    request = RemoveNodeRequest(node_name=name, force=force, dry_run=dry_run)
    with operators(settings) as client:
        found = client.remove_node(request, timeout=settings.timeout_s)
    document(settings, found, _lines(name, found, dry_run=dry_run))


def _lines(name: str, found: RemoveNodeResponse, *, dry_run: bool) -> Iterator[str]:
    would = "would be" if dry_run else "is"
    yield f"{name} {would} removed"
    for keys, words in ((found.ended, "ended"), (found.shrunk, "left with the replicas that they have elsewhere")):
        if keys:
            more = f" and {len(keys) - _SHOWN_MOST} more" if len(keys) > _SHOWN_MOST else ""
            were = "would be" if dry_run else "were"
            yield f"  {len(keys)} workloads {were} {words}: {', '.join(keys[:_SHOWN_MOST])}{more}"
    if found.connected:
        yield "  its agent is connected: stop it, or the node comes back"

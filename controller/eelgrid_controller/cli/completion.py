"""Completion of values in shells: names that the controller knows, asked for while somebody types.

Each answer costs one call with a deadline of a second and shows a bounded number of names. A shell shows nothing else:
without a controller, a certificate or the right to ask there is no completion, and no message either. The controller is
found by the options before the command and by the environment, as the command itself finds it.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import click

from eelgrid_controller.cli.connection import CliSettings, connect_operators

_DEADLINE_S = 1.0
_NAMES_MOST = 200
_PAGE = 1000

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def _settings(context: click.Context) -> CliSettings:
    given = context.find_root().params
    names = ("controller", "tls_certificate", "tls_key", "tls_authority", "insecure")
    return CliSettings(timeout_s=_DEADLINE_S, **{name: given[name] for name in names if given.get(name) is not None})


def _begin_with(names: Iterable[str], typed: str) -> list[str]:
    return sorted({name for name in names if name.startswith(typed)})[:_NAMES_MOST]


def _complete(fetch: Callable[[Any, str], Iterable[str]]) -> Complete:
    """Returns a completion by the names that `fetch` gets from a client; it is silent whatever happens."""

    def complete(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        os.environ["GRPC_VERBOSITY"] = "NONE"
        try:
            with connect_operators(_settings(context)) as client:
                return _begin_with(fetch(client, typed), typed)
        except Exception:  # noqa: BLE001  # a shell has no place for an error
            return []

    return complete


def _list_nodes(client: Any) -> Any:
    from eelgrid_protos.messages import ListNodesRequest

    return client.list_nodes(ListNodesRequest(page_size=_PAGE), timeout=_DEADLINE_S).nodes


def _nodes(client: Any, _typed: str) -> Iterable[str]:
    return (node.inventory.node_name for node in _list_nodes(client))


def _pools(client: Any, _typed: str) -> Iterable[str]:
    from eelgrid_protos.messages import resolve_pool

    return (resolve_pool(node.inventory.pool) for node in _list_nodes(client))


def _gpus(client: Any, typed: str) -> Iterable[str]:
    """Names of GPUs as NODE/INDEX: of one node once its name is complete."""
    from eelgrid_protos.messages import ListGpusRequest

    request = ListGpusRequest(node_name=typed.rpartition("/")[0], page_size=_PAGE)
    return (f"{one.node_name}/{one.gpu.index}" for one in client.list_gpus(request, timeout=_DEADLINE_S).gpus)


def _nodes_and_gpus(client: Any, typed: str) -> Iterable[str]:
    """Names of nodes, and of the GPUs of one node once its name and a slash are typed."""
    return _gpus(client, typed) if "/" in typed else _nodes(client, typed)


def _models(client: Any, _typed: str) -> Iterable[str]:
    from eelgrid_protos.messages import GetSummaryRequest

    summary = client.get_summary(GetSummaryRequest(), timeout=_DEADLINE_S).summary
    return (one.model for one in summary.models)


def _list_workloads(client: Any) -> Any:
    from eelgrid_protos.messages import ListWorkloadsRequest, WorkloadPhase

    live = (WorkloadPhase.PENDING, WorkloadPhase.PLACED)
    return client.list_workloads(ListWorkloadsRequest(phases=live, page_size=_PAGE), timeout=_DEADLINE_S).workloads


def _workloads(client: Any, _typed: str) -> Iterable[str]:
    """Ids, and the names that one workload has alone."""
    found = _list_workloads(client)
    names = [one.spec.name for one in found]
    return [*(one.workload_id for one in found), *(name for name in names if names.count(name) == 1)]


def _owners(field: str) -> Callable[[Any, str], Iterable[str]]:
    return lambda client, _typed: (getattr(one.spec, field) for one in _list_workloads(client))


def _profiles(client: Any, _typed: str) -> Iterable[str]:
    from eelgrid_protos.messages import ListPointsRequest

    return (one.profile for one in client.list_points(ListPointsRequest(page_size=_PAGE), timeout=_DEADLINE_S).points)


def _exporters(client: Any, _typed: str) -> Iterable[str]:
    from eelgrid_protos.messages import ListEnergyExportersRequest

    found = client.list_energy_exporters(ListEnergyExportersRequest(), timeout=_DEADLINE_S)
    return (one.name for one in found.exporters)


complete_nodes = _complete(_nodes)
complete_pools = _complete(_pools)
complete_gpus = _complete(_gpus)
complete_nodes_and_gpus = _complete(_nodes_and_gpus)
complete_models = _complete(_models)
complete_workloads = _complete(_workloads)
complete_namespaces = _complete(_owners("namespace"))
complete_users = _complete(_owners("user"))
complete_queues = _complete(_owners("queue"))
complete_profiles = _complete(_profiles)
complete_exporters = _complete(_exporters)


def complete_model_lists(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Completes the last GPU model of a list such as `A10,T4`."""
    before, comma, last = typed.rpartition(",")
    return [before + comma + model for model in complete_models(context, parameter, last)]


def complete_kind_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Completes the name of a node, GPU or workload, after its kind."""
    kinds = {"node": complete_nodes, "gpu": complete_gpus, "workload": complete_workloads}
    complete = kinds.get(str(context.params.get("kind")))
    return complete(context, parameter, typed) if complete else []


def complete_pairs(complete: Complete, *values: str) -> Complete:
    """Completes NAME=VALUE: the name by `complete`, then the values."""

    def complete_pair(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
        name, equals, value = typed.partition("=")
        if equals:
            return [f"{name}={one}" for one in values if one.startswith(value)]
        return [f"{found}=" for found in complete(context, parameter, typed)]

    return complete_pair


def complete_placements(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
    """Completes the names of placement policies."""
    try:
        from eelgrid_kernels.baselines import policy_names

        return _begin_with(policy_names(), typed)
    except ImportError:
        return []

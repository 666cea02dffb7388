"""Whether a node's own power budget reaches the GPUs that the node has.

Owns that verdict and the words of it, at the start. Must not know how a budget is kept.

Theory. A budget lowers a GPU within the limits that its driver tells (NVML's constraints, hwmon's least and greatest
cap). The catalogue's are of the boards that somebody measured, so they are not asked. A GPU that tells none keeps what
it draws: where no GPU tells any, nothing would ever be lowered, and an agent that was asked to keep a budget must not
run as if it did. Later the guard counts them (`eelgrid_guard_power_budget_fixed_devices`) and tells the controller.
"""

import logging
from collections.abc import Sequence

from eelgrid_protos.messages import Gpu

__all__ = ["NotEnforceable", "check_reach"]

_LOG = logging.getLogger("eelgrid.agent")


class NotEnforceable(Exception):
    """The operator asked for something to be enforced here, and it cannot be; the message says what to do."""


def check_reach(budget_w: float | None, node_name: str, gpus: Sequence[Gpu]) -> None:
    """Warns of GPUs that the budget cannot lower; raises NotEnforceable where it can lower none that is there.

    `budget_w` is in watts, None for no budget. A node without GPUs, or whose driver is not there yet, says nothing.
    """
    there = [gpu for gpu in gpus if not gpu.lost]
    silent = [gpu for gpu in there if gpu.power_limit_min_w is None or gpu.power_limit_max_w is None]
    if budget_w is None or not silent:
        return
    if len(silent) == len(there):
        raise NotEnforceable(
            f"--power-budget {budget_w:g} cannot be kept on {node_name}: none of its {len(there)} GPUs tells which "
            "limits it takes (`nvidia-smi -q -d POWER`), so none can be lowered; leave it out"
        )
    _LOG.warning(
        "event=power_budget_out_of_reach node=%s watts=%g gpus=%s reason=%r",
        node_name, budget_w, ",".join(str(gpu.index) for gpu in silent),
        "they do not tell which limits they take: what they draw counts and is not lowered",
    )  # fmt: skip

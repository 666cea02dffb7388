"""Topology: the GPU links of a node as a bandwidth matrix, and network locations of nodes as integer codes.

Owns what an inventory's links and paths mean as numbers. Must not know what is placed: eelgrid_kernels chooses
GPUs by the matrix, and placement.gang chooses nodes by the codes.

Theory: a link is worth about its bandwidth one way, in whole GB/s: 25 for each NVLink lane, about 12 for PCIe
3.0 x16, less with every bridge, and least between processors. Only the order matters, and it is NVML's; single
machines may measure otherwise (Li et al., "Evaluating Modern GPU Interconnect", IEEE TPDS 31, 2020). A link that
the driver does not report is worth nothing, unless both GPUs name their NUMA node.
"""

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from eelgrid_protos.messages import Gpu, GpuLink

Ints = NDArray[np.int64]
_LANE_GB_S = 25
# By NVML's nearest common ancestor: board, PCIe switch, several switches, host bridge, processor, machine.
_PCIE_GB_S = {0: 13, 10: 12, 20: 11, 30: 10, 40: 9, 50: 6}
_SAME_NUMA, _OTHER_NUMA = 40, 50


def _ancestor_gb_s(ancestor: int) -> int:
    """Returns the bandwidth of a common ancestor in GB/s; an unknown level counts as the next nearer one."""
    return _PCIE_GB_S[max((level for level in _PCIE_GB_S if level <= ancestor), default=_OTHER_NUMA)]


def build_link_matrix(gpus: Sequence[Gpu], links: Iterable[GpuLink]) -> Ints | None:
    """Returns bandwidths (G, G) in the order of `gpus`, in GB/s; None if they could not affect a choice."""
    told = {frozenset((link.one, link.other)): link for link in links}
    matrix = np.zeros((len(gpus), len(gpus)), np.int64)
    values = set()
    for (row, one), (column, other) in combinations(enumerate(gpus), 2):
        link = told.get(frozenset((one.index, other.index)))
        if link is not None:
            value = _LANE_GB_S * link.nvlinks + _ancestor_gb_s(link.ancestor)
        elif one.numa_node is not None and other.numa_node is not None:
            value = _ancestor_gb_s(_SAME_NUMA if one.numa_node == other.numa_node else _OTHER_NUMA)
        else:
            continue
        matrix[row, column] = matrix[column, row] = value
        values.add(value)
    if len(values) <= 1:
        return None
    matrix.flags.writeable = False
    return matrix


class NetworkLocations:
    """Network path of each row, and codes of shared places; rows without a path share one place."""

    def __init__(self) -> None:
        self._paths: list[tuple[str, ...]] = []
        self._codes: Ints | None = None

    def add_path(self, row: int, path: tuple[str, ...]) -> None:
        """Sets the path of a row, outermost place first; rows are added in order."""
        if row == len(self._paths):
            self._paths.append(path)
        elif self._paths[row] != path:
            self._paths[row] = path
        else:
            return
        self._codes = None

    def codes(self) -> Ints:
        """Returns codes (N, L), equal at a level for rows in the same place there, in the order of the paths' names."""
        if self._codes is None:
            levels = max(map(len, self._paths), default=0)
            columns = []
            for level in range(levels):
                prefixes = [path[: level + 1] for path in self._paths]
                code = {prefix: number for number, prefix in enumerate(sorted(set(prefixes)))}
                columns.append([code[prefix] for prefix in prefixes])
            self._codes = np.array(columns, np.int64).reshape(levels, len(self._paths)).T.copy()
            self._codes.flags.writeable = False
        return self._codes

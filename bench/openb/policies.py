"""The policies of the comparison by name: those that the controller offers, with one setting for every trace."""

from eelgrid_kernels.policies import Policy, names, policy

__all__ = ["Policy", "names", "policy"]

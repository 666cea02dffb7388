"""Errors of the partition planner, in one tree.

PartitionError               no plan; the message says what to do
├── BadProblem               a field that cannot be meant; whoever asked must correct it
├── Unservable               a service that no measured point can serve, however many GPUs there are
├── FleetTooSmall            the pools do not hold what is asked for
└── SearchExhausted          the search was cut before it had any plan
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["BadProblem", "FleetTooSmall", "PartitionError", "SearchExhausted", "Unservable"]


class PartitionError(ControllerError):
    """There is no plan."""


class BadProblem(PartitionError):
    """A field that cannot be meant."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)


class Unservable(PartitionError):
    """No point serves this service; `tightest_s` is the least latency that was measured, None if none was."""

    def __init__(self, service: str, tightest_s: float | None, problem: str, remedy: str) -> None:
        self.service = service
        self.tightest_s = tightest_s
        super().__init__(f"service {service}: {problem}", remedy)


class FleetTooSmall(PartitionError):
    """The pools lack GPUs; `missing` says how many of which model would do, by model."""

    def __init__(self, missing: dict[str, int], remedy: str) -> None:
        self.missing = missing
        listed = ", ".join(f"{count} {model}" for model, count in missing.items())
        super().__init__(f"the pools lack {listed}", remedy)


class SearchExhausted(PartitionError):
    """The search was cut before it had any plan."""

"""What cannot be asked about elastic jobs.

ControllerError
└── ElasticRefused    the caller's numbers say nothing; `field` is at fault
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["ElasticRefused"]


class ElasticRefused(ControllerError):
    """A field that cannot be planned with."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        super().__init__(f"{field}: {problem}", remedy)

"""What cannot be read of an object, in one tree under the controller's own.

KubernetesUnreadable         an object, or a part of it, that no API server would give
├── QuantityUnreadable       a text that is no quantity
└── AnnotationUnreadable     an annotation that says nothing that can be kept
"""

from eelgrid_controller.errors import ControllerError

__all__ = ["AnnotationUnreadable", "KubernetesUnreadable", "QuantityUnreadable"]


class KubernetesUnreadable(ControllerError):
    """A field that has no meaning; `field` is its path, `fault` what is wrong with it."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        self.field = field
        self.fault = problem
        super().__init__(f"{field}: {problem}", remedy)


class QuantityUnreadable(KubernetesUnreadable):
    """A text that is no quantity."""


class AnnotationUnreadable(KubernetesUnreadable):
    """An annotation that says nothing that can be kept."""

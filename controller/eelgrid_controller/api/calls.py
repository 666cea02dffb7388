"""How the parts of the operators' service learn whose a call is. Owns the port alone."""

from collections.abc import Callable
from typing import Any, TypeAlias

import grpc.aio

from eelgrid_controller.audit import Call

__all__ = ["CallOf", "no_call"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
# The call behind a request, by its name; None where nobody keeps account of calls.
CallOf: TypeAlias = Callable[[str, object, Context], Call | None]


def no_call(_method: str, _request: object, _context: Context) -> None:
    """Keeps no account of calls."""

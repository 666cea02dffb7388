"""Libraries that only the simulator needs, and what a person is told where one is missing.

Owns that error. Must not know what a library is used for beyond its one word.
"""

import importlib
from typing import Any

__all__ = ["LibraryMissing", "library"]


class LibraryMissing(Exception):
    """A library that was asked for is not installed; the message names it and how to get it."""

    def __init__(self, name: str, purpose: str, install: str) -> None:
        self.name, self.problem = name, f"{purpose} needs {name}, which is not installed"
        self.remedy = f"install it with: pip install {install}"
        super().__init__(f"{self.problem}; {self.remedy}")


def library(module: str, purpose: str, install: str) -> Any:
    """The module; raises LibraryMissing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise LibraryMissing(module.partition(".")[0], purpose, install) from None

"""Imports of optional libraries, with an error that names the missing package and how to install it."""

import importlib
from typing import Any


class LibraryMissing(Exception):
    """A library that was asked for is not installed; the message names it and how to get it."""

    def __init__(self, name: str, purpose: str, install: str) -> None:
        self.name, self.problem = name, f"{purpose} needs {name}, which is not installed"
        self.remedy = f"install it with: pip install {install}"
        super().__init__(f"{self.problem}; {self.remedy}")


def import_library(module: str, purpose: str, install: str) -> Any:
    """The module; raises LibraryMissing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise LibraryMissing(module.partition(".")[0], purpose, install) from None

"""Errors of the catalogue.

CatalogueError               a catalogue file breaks a rule: whoever edited it is at fault
"""

__all__ = ["CatalogueError"]


class CatalogueError(ValueError):
    """A catalogue file breaks a rule; the message names the place and the remedy."""

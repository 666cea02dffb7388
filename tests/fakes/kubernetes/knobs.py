"""What a test may do to the fake: make it slow, refuse, lose answers, drop watches."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Trouble:
    """What befalls requests; it ends after so many of them, never where `times` is None."""

    what: str  # slow, refuse, lose (carried out, no answer), hang (neither)
    times: int | None = None
    verbs: frozenset[str] = frozenset()  # create, delete, get, list, patch, update, watch; all where empty
    part: str = ""  # of the path
    delay_s: float = 0.0
    fault: Any = None  # a function that makes the Fault
    met: int = 0

    def meets(self, verb, path):
        return (
            (not self.verbs or verb in self.verbs)
            and self.part in path
            and (self.times is None or self.met < self.times)
        )


@dataclass
class Knobs:
    """Troubles in force, and how watches behave."""

    troubles: list = field(default_factory=list)
    bookmark_every_s: float = 5.0
    is_mute: bool = False  # watches stay open and tell nothing
    timeout_most_s: float = 1800.0  # of a watch
    aggregated: bool = True  # discovery in two requests

    def add(self, what, **how):
        """Put a trouble into force; give it to `end` to end it."""
        if "verbs" in how:
            how["verbs"] = frozenset(how["verbs"])
        trouble = Trouble(what, **how)
        self.troubles.append(trouble)
        return trouble

    def end(self, trouble=None):
        """End one trouble, or all."""
        if trouble is None:
            self.troubles.clear()
        else:
            self.troubles.remove(trouble)

    def meet(self, verb, path):
        """The troubles of a request."""
        found = [one for one in self.troubles if one.meets(verb, path)]
        for one in found:
            one.met += 1
        return found

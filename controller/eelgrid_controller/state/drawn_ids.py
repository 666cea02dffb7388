"""Ids that the controller draws for work that is submitted without one: w-1, w-2 and so on.

The numbers only rise, past every one that was drawn or that somebody chose, be it for work or as an element's (w-7_0), so that what
is drawn is free. The numbers of `DRAWN_ONLY`, to which a chosen one may have raised them, cannot be chosen; greater ones are
never drawn.
"""

DRAWN_ONLY = range(10**18, 10**19)
_PREFIX = "w-"


def read_drawn_number(workload_id: str) -> int:
    """Returns the number of an id that is, or begins like, a drawn one; 0 for any other."""
    before, _, rest = workload_id.partition(_PREFIX)
    digits = rest.partition("_")[0]
    return int(digits) if not before and digits.isascii() and digits.isdigit() else 0

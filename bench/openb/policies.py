"""Names of traces and policies that were asked for, and the policy that savings are measured against."""

from collections.abc import Sequence

from bench.runner import Unusable
from eelgrid_controller.replay.policy_comparison import find_replayed_policy
from eelgrid_kernels.baselines import policy_names

REFERENCE, OURS = "fgd", "eelgrid"


def choose_names(asked: str, every: Sequence[str]) -> tuple[str, ...]:
    """The names in a list with commas, each once; every one there is for `all`."""
    wanted = tuple(dict.fromkeys(name.strip() for name in asked.split(",") if name.strip()))
    if not wanted:
        raise Unusable(f"an empty list of names; write all, or some of {', '.join(every)}")
    return tuple(every) if wanted == ("all",) else wanted


def chosen_policies(asked: str) -> tuple[str, ...]:
    """What was asked for; what a name may be is for find_replayed_policy to say."""
    chosen = choose_names(asked, policy_names())
    for name in chosen:
        try:
            find_replayed_policy(name)
        except ValueError as unknown:
            raise Unusable(str(unknown)) from None
    return chosen

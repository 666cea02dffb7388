"""What a MutatingAdmissionPolicy of ours does to pods, as a mutator of the fake.

fake.api.mutators.append(gate_injector())
"""

from tests.builders.kubernetes import GATE
from tests.fakes.kubernetes.faults import forbidden

MANAGED = "eelgrid.io/managed"


def gate_injector(label=MANAGED, value="true", gate=GATE):
    """Adds the gate to each new pod with this label; to no other, and not twice."""

    def mutate(kind, found):
        if kind.plural != "pods" or (found["metadata"].get("labels") or {}).get(label) != value:
            return
        gates = found["spec"].setdefault("schedulingGates", [])
        if not any(one["name"] == gate for one in gates):
            gates.append({"name": gate})

    return mutate


def webhook_away(label=MANAGED, value="true"):
    """A webhook that fails closed and does not answer: pods that it means are refused."""

    def mutate(kind, found):
        if kind.plural == "pods" and (found["metadata"].get("labels") or {}).get(label) == value:
            why = 'failed calling webhook "gate.eelgrid.io": connection refused'
            raise forbidden(kind, found["metadata"]["name"], why)

    return mutate

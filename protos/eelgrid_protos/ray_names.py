"""Names in Ray by which the client library and the controller know each other's work.

Owns them alone. Must not know what is done with what they name.
"""

# A label of a raylet: what Eelgrid calls its node.
NODE_LABEL = "eelgrid.io/node"
# A label of workloads: who made one, the client library or the controller for a job that asked nobody; or what it stands for.
ORIGIN, OF_CLIENT, OF_JOB, OF_SERVE = "ray/origin", "client", "job", "serve"
# A label of a workload that stands for a deployment of Serve: application/deployment.
SERVE_LABEL = "ray/serve"
# Labels of a job that is a node of Ray: of which cluster, and of which type; and the label of its raylet.
CAPACITY_OF, NODE_TYPE = "ray/capacity", "ray/node-type"
CAPACITY_LABEL = "eelgrid.io/capacity"
# Required of nodes by the client library, so that its work comes to nodes of Ray only.
NODE_TRAIT = "ray/node"
# The name of a placement group that is reserved for a workload: this, and the workload's id.
GROUP_PREFIX = "eelgrid:"
# In the runtime environment of what belongs to a workload: its id.
WORKLOAD_VARIABLE = "EELGRID_WORKLOAD_ID"


def label_trait(key: str, value: str) -> str:
    """Returns the trait of a node whose raylet has a label."""
    return f"ray/label/{key}={value}"


def mig_resource(profile: str) -> str:
    """Returns the name of Ray's resource for MIG slices: mig_1g_10gb for 1g.10gb."""
    return "mig_" + profile.replace(".", "_").replace("+", "_")

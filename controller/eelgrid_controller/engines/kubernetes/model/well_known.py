"""Well-known names: labels, annotations, taints, gates, conditions and resources of Eelgrid and of others.

Sources: JobSet (api/jobset/v1alpha2/jobset_types.go), LeaderWorkerSet (api/leaderworkerset/v1/
leaderworkerset_types.go), Kubeflow's training operator (pkg/apis/kubeflow.org/v1/common_types.go) and trainer, KubeRay
(ray-operator/controllers/ray/utils/constant.go), Kueue (pkg/controller/constants, pkg/controller/jobs/pod/constants),
NVIDIA's GPU feature discovery (resource labels) and mig-parted (nvidia.com/mig.config.state).
"""

DOMAIN = "eelgrid.io"

# On a pod or on its namespace: Eelgrid may place it.
LABEL_MANAGED = "eelgrid.io/managed"
MANAGED = "true"
GATE = "eelgrid.io/placement"
# In a pod's `schedulerName`: Eelgrid binds it, in mode `scheduler`.
SCHEDULER = "eelgrid"
# On a pod, by us: JSON with plan, epoch, workload, replica, node, devices, profile.
ANNOTATION_PLAN = "eelgrid.io/plan"
# On a pod that waits, by a leader whose term begins: the term and the version that it was changed from, so that
# whatever a former leader still sends against that version is refused.
ANNOTATION_FENCE = "eelgrid.io/fence"

# On a pod's status, by us: whether it was placed, and why not.
CONDITION_PLACEMENT = "eelgrid.io/Placement"

# On a node: its pool, who writes its MIG layout, and that only managed pods may come.
LABEL_POOL = "eelgrid.io/pool"
LABEL_MIG_OWNER = "eelgrid.io/mig-owner"
TAINT_MANAGED = "eelgrid.io/managed"
# On a node, by us, for as long as its GPUs are cut anew.
TAINT_REPARTITION = "eelgrid.io/repartition"

# On a node, by its people: take managed pods off, "true". By us: how far that is.
ANNOTATION_DRAIN = "eelgrid.io/drain"
ANNOTATION_DRAINED = "eelgrid.io/drain-status"
# On a node, by us: which of a cordon and a drain are an operator's of Eelgrid's, so that uncordon takes no more away.
ANNOTATION_CORDONED = "eelgrid.io/cordoned"

# By us, on what is moved: the note of the move, on a pod and on its Deployment; the label finds the Deployment.
ANNOTATION_MOVE = "eelgrid.io/move"
LABEL_MOVING = "eelgrid.io/moving"
# On a pod, by us: when it will be evicted, and when it came here by a move.
ANNOTATION_EVICT_AT = "eelgrid.io/evict-at"
ANNOTATION_MOVED_AT = "eelgrid.io/moved-at"
# Kubernetes' own: which pod of a ReplicaSet goes first.
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

# On a pod, by its people: what they want.
ANNOTATION_KIND = "eelgrid.io/kind"
ANNOTATION_RATE = "eelgrid.io/rate"
ANNOTATION_OBJECTIVE = "eelgrid.io/objective"
ANNOTATION_OUTPUT_TOKENS = "eelgrid.io/output-tokens"
ANNOTATION_SLOWDOWN = "eelgrid.io/slowdown"
ANNOTATION_DEADLINE = "eelgrid.io/deadline"
ANNOTATION_WORK = "eelgrid.io/work"
ANNOTATION_WORK_UNIT = "eelgrid.io/work-unit"
# A label of the same name does, too, where what is in it is short and plain enough.
ANNOTATION_USER = "eelgrid.io/user"
ANNOTATION_PRIORITY = "eelgrid.io/priority"
ANNOTATION_CHECKPOINT_GRACE = "eelgrid.io/checkpoint-grace"
ANNOTATION_PROFILE = "eelgrid.io/profile"
ANNOTATION_METRICS = "eelgrid.io/metrics"
ANNOTATION_GPU_MODELS = "eelgrid.io/gpu-models"
ANNOTATION_PREFERRED_GPU_MODELS = "eelgrid.io/preferred-gpu-models"
ANNOTATION_PREFERRED_GPU_WORTH = "eelgrid.io/preferred-gpu-worth-watts"
ANNOTATION_MODEL_DATA = "eelgrid.io/model-data"
ANNOTATION_MODEL_DATA_WORTH = "eelgrid.io/model-data-worth-watts"
ANNOTATION_GROUP = "eelgrid.io/group"
ANNOTATION_GROUP_SIZE = "eelgrid.io/group-size"
ANNOTATION_ON_ERROR = "eelgrid.io/on-error"
# Whether it may be stopped to make room, if its queue lets others preempt it: true, false. Without it, what its owner makes
# anew.
ANNOTATION_PREEMPTIBLE = "eelgrid.io/preemptible"
# `recreate`: made anew by its owner where it holds devices that no plan can be made to fit.
ANNOTATION_WRONG_DEVICES = "eelgrid.io/wrong-devices"

# On a suspended job, by its people: that its request may be changed before it starts, and to what.
ANNOTATION_RIGHT_SIZE = "eelgrid.io/right-size"  # true, recommend
ANNOTATION_GPUS = "eelgrid.io/gpus"  # of one pod: 1-8, or 1, 2, 4
ANNOTATION_WORKERS = "eelgrid.io/workers"  # pods of an Indexed Job, likewise
ANNOTATION_SLICES = "eelgrid.io/slices"  # MIG profiles that will do instead of one GPU
ANNOTATION_UNSUSPEND = "eelgrid.io/unsuspend"
# On that job, by us: JSON with what was done, why, before and after.
ANNOTATION_RIGHT_SIZED = "eelgrid.io/right-sized"
# On a ClusterQueue, by its people: the largest boost; on a Workload, by us: the boost that is ours.
ANNOTATION_PREEMPTION_BOOST = "eelgrid.io/preemption-boost"

# On an InferenceService: how long a new replica takes until it serves.
ANNOTATION_START = "eelgrid.io/start"

RESOURCE_GPU = "nvidia.com/gpu"
RESOURCE_GPU_SHARED = "nvidia.com/gpu.shared"
# What counts as a GPU; of others than NVIDIA's the node is asked whether it has them.
RESOURCES_GPU = (RESOURCE_GPU, "amd.com/gpu")
RESOURCE_MIG_PREFIX = "nvidia.com/mig-"

# Of workloads of others, on pods. Those of Jobs and StatefulSets are Kubernetes' own.
JOB_INDEX = "batch.kubernetes.io/job-completion-index"
STATEFUL_INDEX = "apps.kubernetes.io/pod-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
JOBSET_PART = "jobset.sigs.k8s.io/replicatedjob-name"
JOBSET_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
LWS_NAME = "leaderworkerset.sigs.k8s.io/name"
LWS_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
LWS_WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
LWS_SIZE = "leaderworkerset.sigs.k8s.io/size"  # an annotation
KUBEFLOW_PART = "training.kubeflow.org/replica-type"
KUBEFLOW_ROLE = "training.kubeflow.org/job-role"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
KUEUE_LOCAL_QUEUE = "kueue.x-k8s.io/local-queue-name"  # on pods, by Kueue: those of a job have no other label of it
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"
KUEUE_TOTAL = "kueue.x-k8s.io/pod-group-total-count"  # an annotation, as the next
KUEUE_SERVING = "kueue.x-k8s.io/pod-group-serving"
KUEUE_INDEX = "kueue.x-k8s.io/pod-group-pod-index"
# On a job that Kueue manages: who must prepare it before Kueue may admit it, and what preempting it costs.
KUEUE_GATED_BY = "kueue.x-k8s.io/admission-gated-by"
KUEUE_OUR_GATE = "eelgrid.io/right-size"  # an entry of KUEUE_GATED_BY
KUEUE_PRIORITY_BOOST = "kueue.x-k8s.io/priority-boost"  # on a Workload

# Of NVIDIA's stack, on nodes: GPU feature discovery and mig-manager.
NODE_GPU_PRODUCT = "nvidia.com/gpu.product"
NODE_GPU_MEMORY = "nvidia.com/gpu.memory"  # MiB of one device
NODE_GPU_SHARING = "nvidia.com/gpu.sharing-strategy"  # none, time-slicing, mps
NODE_DRIVER_FULL = "nvidia.com/cuda.driver-version.full"
NODE_DRIVER_PARTS = ("nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver.minor", "nvidia.com/cuda.driver.rev")
NODE_MIG_CONFIG = "nvidia.com/mig.config"
NODE_MIG_STATE = "nvidia.com/mig.config.state"  # pending, rebooting, success, failed
NODE_MIG_STRATEGY = "nvidia.com/mig.strategy"

# Which label names a node's pool; the first that is there.
NODE_POOLS = (
    LABEL_POOL,
    "cloud.google.com/gke-nodepool",
    "eks.amazonaws.com/nodegroup",
    "karpenter.sh/nodepool",
    "kubernetes.azure.com/agentpool",
)
# Where a node stands, outermost first.
NODE_TOPOLOGY = (
    "topology.kubernetes.io/region",
    "topology.kubernetes.io/zone",
    "topology.k8s.aws/network-node-layer-1",
    "topology.k8s.aws/network-node-layer-2",
    "topology.k8s.aws/network-node-layer-3",
    "cloud.google.com/gce-topology-block",
    "cloud.google.com/gce-topology-subblock",
    "eelgrid.io/rack",
)
# What an inventory shows of a node's labels; there are too many to hand on.
NODE_SHOWN = (
    "kubernetes.io/arch",
    "node.kubernetes.io/instance-type",
    NODE_GPU_PRODUCT,
    NODE_MIG_CONFIG,
    NODE_MIG_STATE,
    NODE_MIG_STRATEGY,
    LABEL_MIG_OWNER,
    *NODE_TOPOLOGY,
)

# Annotations of pods under these domains are kept in memory; all others are not.
KEPT_DOMAINS = frozenset(
    {
        DOMAIN,
        "apps.kubernetes.io",
        "batch.kubernetes.io",
        "controller.kubernetes.io",
        "jobset.sigs.k8s.io",
        "kueue.x-k8s.io",
        "leaderworkerset.sigs.k8s.io",
        "ray.io",
        "trainer.kubeflow.org",
        "training.kubeflow.org",
    }
)


def plain_product(label: str) -> str:
    """A product label without the brand; GPU feature discovery writes spaces as dashes."""
    for brand in ("NVIDIA-", "Tesla-", "GRID-"):
        label = label.removeprefix(brand)
    return label


def is_kept_annotation(key: str) -> bool:
    """Whether an annotation of a pod with this key is one that somebody here reads."""
    domain, slash, _ = key.partition("/")
    return bool(slash) and domain in KEPT_DOMAINS

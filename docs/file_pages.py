"""The reference pages of the files that people write: workloads for `eelctl submit -f`, and fleets to simulate.

Owns what each field means in plain words; type, range and default come from the messages that the parsers fill. A field
without a meaning here, or a meaning without a field, is an error, so that no field is left off a page. The fields of the
fleet file are read one by one in `simulation/spec.py`; tests compare them with FLEET_FIELDS.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from docs.metric_pages import HEAD

from eelgrid_protos.messages import (
    STOP_SIGNALS,
    AddNodes,
    CancelWorkloads,
    DrainNodes,
    GangPart,
    GpuPreference,
    GpuSharing,
    JobArrayRequest,
    JobDeadline,
    JobDependency,
    JobSchedule,
    LatencyObjective,
    LoadTarget,
    MetricsSource,
    ModelData,
    NodeShape,
    PlaceAnew,
    ProcessSpec,
    ResourceRequest,
    ServicePromise,
    SetPowerBudgets,
    SetWeights,
    SubmitCopies,
    TerminalSize,
    TrainingPromise,
    Weights,
    WorkloadSpec,
)
from eelgrid_protos.quantities import Many, Range, Text
from eelgrid_protos.schema import SchemaField, ValueShape, fields_of

MEANINGS: Mapping[type, Mapping[str, str]] = {
    WorkloadSpec: {
        "name": "what people call it; need not be unique",
        "request": "what each replica needs: [request](#request)",
        "kind": "what it is, which decides how it is measured",
        "replicas": "copies, placed together or not at all",
        "namespace": "whose it is, in reports and spending limits",
        "user": "who submits it; with a submitter's certificate its own user, which it may leave out",
        "queue": "the queue that it is listed and charged under",
        "priority": "the higher is placed first; whom it preempts is a matter of its [queue](../how-to/queues.md#let-work-preempt-other-work)",
        "labels": "your own keys and values, for reports and spending limits",
        "locality": "`pack` places replicas on few nodes, racks and switches, `spread` apart, `unspecified` anywhere",
        "mobility": "whether an operator's move may take it elsewhere: `fixed` never; `movable` once its new place is "
        "reserved; `restartable` also if it must stop first; `unspecified` is `movable`",
        "service": "objectives of an `inference_service`: [service](#service)",
        "training": "the bound of a `training_job`: [training](#training)",
        "required_traits": "only nodes with all of these traits, which an engine assigns; on Kubernetes Eelgrid does",
        "never_preempts": "it waits rather than preempt other work, whatever its queue allows",
        "priority_class": "a [priority class](../how-to/queues.md#let-work-preempt-other-work), whose priority and promise it gets",
        "evicted_by_engine": "an engine stops it if it has to make room, and its owner submits it anew; Kubernetes' part sets it",
        "process": "the command that agents run for each replica: [process](#process); with it `mobility` is `fixed`",
        "expected_runtime_s": "how long it is expected to run; nothing ends for it, and others may start before it by it: "
        "[queueing](../explanation/queueing.md#backfill)",
        "deadline": "by when it must have ended, promised or refused: [deadline](#deadline)",
        "schedule": "what it waits for before capacity, queue and priority count: [schedule](#schedule)",
        "gang": "starts it together with the other parts of a gang: [gang](#gang)",
        "gpu_preference": "GPU models that it had rather than others that it may use: [gpu_preference](#gpu_preference)",
        "model_data": "what it loads when it starts: it had rather nodes that have it on disk, [model_data](#model_data)",
        "gpu_sharing": "on a share of a GPU: its load, and how far others may slow it down: [gpu_sharing](#gpu_sharing)",
        "array": "submits many of it, which differ in index and parameters: [array](#array), or only its indexes",
    },
    JobDeadline: {
        "end_ns": "nanoseconds since 1970 in UTC; with `expected_runtime_s` or a time limit",
        "best_effort": "accepted even if the time cannot be kept; nothing is reserved",
    },
    GpuPreference: {
        "models": "the models that it prefers, by any of their [names](gpu-names.md)",
        "worth_w": "by how many watts of modelled cost a replica may cost more on one of them than elsewhere; without it, "
        "it goes to them wherever they have room",
    },
    GpuSharing: {
        "load": "the name of its load in measured pairs, `eelctl interference list`; without it, the profile of a service",
        "slowdown_most": "how much longer it may take beside others than alone on its share, `0.2` for a fifth; without it, "
        "the policy's limit",
    },
    ModelData: {
        "data_names": "names as agents tell them: those of Hugging Face's cache, or of folders and files",
        "worth_w": "by how many watts of modelled cost a replica may cost more on a node that has all of it than elsewhere; "
        "without it, it goes to such nodes wherever they have room",
    },
    GangPart: {
        "name": "the gang: the workloads of the same namespace and owner that name it",
        "parts": "how many parts it has, the same in each; none starts before all of them are submitted",
        "parts_least": "how many of them, the first by submission, must start together; 0 for all",
    },
    JobSchedule: {
        "begin_ns": "it does not start before this time, in nanoseconds since 1970; 0 for at once",
        "after": "the workloads that must have ended before, all of them; each once",
        "retries_most": "how often it is started again after a failed attempt, 10 s later, then 20 s, up to 6 minutes; "
        "only with a process",
        "no_requeue": "it never runs a second time: it is not preempted, a drain leaves it unless it is forced, and it "
        "has ended if its node or GPU failed; only with a process and without retries",
    },
    JobDependency: {
        "workload_id": "a workload that the controller knows, or an array: all of its elements",
        "condition": "how it must have ended: `succeeded`; `ended` in any way; `not_succeeded` is failed or cancelled",
        "each": "of an array for an array of the same indexes: each element waits only for the one with its own",
    },
    JobArrayRequest: {
        "indexes": "`0-9`, `0-8:2`, `1,3,5-7`, and `%N` for at most N at once; with `parameters` only `%N`",
        "parameters": "`lr=0.1,0.01` or `seed=0-3`: each combination is an element, counted from 0, and `{lr}` in `argv` is "
        "replaced",
        "rerun_of": "an ended array whose elements, or those of `indexes`, run again as they were",
    },
    TerminalSize: {
        "rows": "of its screen",
        "columns": "of its screen",
    },
    ProcessSpec: {
        "argv": "the program and its arguments; a program without a slash is searched for in `PATH`",
        "environment": "variables beside those that the [agent sets](../tutorials/one-box.md#what-a-job-finds)",
        "working_directory": "an absolute path on the node",
        "stop_signal": "asks it to end: " + ", ".join(f"`{name}`" for name in STOP_SIGNALS),
        "grace_s": "from the stop signal until everything that is left is killed",
        "time_limit_s": "it is asked to end after this long; 0 for never",
        "log_bytes_most": "output beyond this is discarded; 0 for 64 MiB",
        "element_variables": "`EELGRID_ARRAY_` and `EELGRID_PARAM_` variables of an element of an array, which the "
        "controller sets",
        "standard_input": "`pipe` or `terminal`: [attached clients](../how-to/interactive-jobs.md) send input; without it "
        "the process reads an end at once",
        "warn_signal": "announces the end, so long before the time limit or before the stop signal: one of the above",
        "warn_before_s": "how long before it is sent",
        "terminal_size": "`{rows: 24, columns: 80}` of its terminal at its start",
    },
    ResourceRequest: {
        "cpu_milli": "thousandths of a CPU; `cpu: 2.5` or `cpu: 2500m` instead",
        "memory_bytes": "main memory; `memory: 16GiB` instead",
        "gpu_count": "GPUs on one node; `gpus: 2` instead",
        "gpu_milli": "thousandths of each GPU, 1000 for whole ones; `gpu_share: 0.5` or `50%` instead. A share is of one "
        "GPU. Not written, it is 1000 if there are GPUs",
        "gpu_models": "acceptable models, by any of their [names](gpu-names.md); empty is any",
    },
    ServicePromise: {
        "profile": "the name under which its points were measured (`eelctl profile import`); needed for objectives",
        "objectives": "one to three, each metric once: [objectives](#objectives); or `load_target`",
        "rate_hz": "requests per second that are expected at the start",
        "replicas_least": "never fewer; 1 with `slices`",
        "replicas_most": "never more; `replicas` must be between the two",
        "start_s": "time until a new replica serves, until that is measured",
        "metrics": "where its replicas' metrics are: [metrics](#metrics)",
        "output_tokens": "tokens of a typical response; needed for objectives on tokens",
        "arrival_cv2": "squared coefficient of variation of the times between requests: 1 is random arrivals, more is bursts",
        "slices": "served by MIG slices of partitioned pools: one objective, on `response`, and `gpus: 1`",
        "load_target": "instead of objectives and a profile, how much each replica should carry: [load_target](#load_target)",
    },
    LoadTarget: {
        "metric": "`requests` that arrive per second, output `tokens` per second (vllm, sglang and tgi tell them), or "
        "requests `in_flight`, which run or wait",
        "per_replica": "how many, for each replica",
    },
    LatencyObjective: {
        "metric": "`response` is the whole response and stands alone; `inter_token` is the time between tokens; "
        "`first_token` needs `inter_token` beside it",
        "latency_s": "what the quantile must not exceed",
        "quantile": "of which the objective is",
    },
    TrainingPromise: {
        "profile": "the name under which its points were measured; needed for an elastic job",
        "slowdown_most": "the largest additional share of time over the whole job: 0.05 is 5 %",
        "work": "units of work to be done by the deadline; goes with `deadline_ns`, or of an elastic job with the deadline of the workload",
        "deadline_ns": "when they must be done, in nanoseconds since 1970; `date -d '2027-01-31 18:00' +%s%N` prints it",
        "energy_weight": "for best effort: 0 counts time alone, 1 energy alone",
        "metrics": "a page with a counter of work: [metrics](#metrics); without it the job reports progress itself",
        "replicas_least": "of an elastic job: never fewer",
        "replicas_most": "of an elastic job: never more; 0 is a job that is not elastic",
        "restart_s": "how long a change of replicas stops it, with its checkpoint",
        "work_unit": "the unit of its progress: step, image, sample, but not request, token or work",
    },
    MetricsSource: {
        "server": "which server's metric names are read; `generic` reads those that you name",
        "url": "the page, http or https; `{node}` and `{replica}` are filled in for each replica",
        "model": "only series of this model, where a server has several",
        "latency_histogram": "for `generic` and a service: histogram of response times in seconds",
        "waiting_gauge": "for `generic` and a service: gauge of waiting requests",
        "work_counter": "for a job: counter of units of work done",
    },
    AddNodes: {"shape": "what each is: [NodeShape](#nodeshape)", "count": "how many"},
    NodeShape: {
        "like_node": "the name of a node that it is like; then nothing else",
        "gpu": "a model, by any of its [names](gpu-names.md); goes with `gpu_count`",
        "gpu_count": "GPUs of the node",
        "cpu_milli": "thousandths of a CPU; 0 is 24 CPUs per GPU",
        "memory_bytes": "main memory; 0 is three times the GPUs' memory",
    },
    DrainNodes: {
        "node_names": "the nodes that take no work any more",
        "remove": "whether they are switched off, too, so that their idle watts go",
    },
    SetPowerBudgets: {"budgets": "all that are in force then: `[{scope: rack, name: r1, limit_w: 20000}]`"},
    SetWeights: {
        "objective": "`energy`, `balanced` or `performance`",
        "weights": "numbers instead of a name: [Weights](#weights), as in [the cost](../explanation/placement.md#the-cost)",
    },
    Weights: {
        "power": "of modelled watts",
        "fragmentation_w": "watts per GPU that becomes useless to the typical mix; [more where CPU runs out first](../explanation/placement.md#stranding)",
        "stranding_w": "watts for GPUs left without CPU or memory, and the other way round",
        "lookahead": "of the power that the next typical workloads will draw",
        "scarcity_w": "watts for the use of a scarce model",
        "stranding_full_w": "as `stranding_w`, in a full fleet where no work ends; [less where it does](../explanation/placement.md#stranding)",
        "locality_w": "watts per level of distance, of workloads with a locality",
    },
    PlaceAnew: {},
    SubmitCopies: {
        "spec": "a workload as in [the workload file](workload-file.md), with amounts as people write them",
        "copies": "how many times",
    },
    CancelWorkloads: {"workload_ids": "the workloads that end"},
}
# By object of the fleet file: field, type, limits, default, meaning. Compared with its reader by tests.
FLEET_FIELDS: Mapping[str, Sequence[tuple[str, str, str, str, str]]] = {
    "node": (
        (
            "name",
            "text",
            "up to 253 letters, digits and `.` `_` `/` `-`",
            "required",
            "`{index}` stands for 0 to count - 1",
        ),
        ("count", "whole number", "1 to 20000", "1", "equal nodes; with more than one, put `{index}` in the name"),
        ("cpu_milli", "whole number", "0 to 10000000", "required", "thousandths of a CPU: 96000 is 96 CPUs"),
        ("memory_bytes", "whole number", "0 to 2^50", "required", "bytes of main memory: 412316860416 is 384 GiB"),
        ("gpus", "list", "up to 64 GPUs", "none", "[GPUs](#gpus)"),
        ("pool", "text", "", "none", "the pool, whose enforcement mode applies"),
        ("labels", "mapping of text", "", "none", "labels of the node"),
        ("model_data", "list", "up to 256 names", "none", "[model data](../how-to/model-data.md) on its disks"),
        ("topology", "text", "up to 8 parts", "none", "where it is, outermost first: `zone-a/spine-2/rack-7`"),
        (
            "driver_version",
            "text",
            "begins with a number",
            "580.95.05",
            "the driver, whose branch decides what it answers",
        ),
        (
            "hurry",
            "number",
            "1 to 3600",
            "1",
            "shortens the agent's own waits by this factor (anomalies, quarantine, repairs), to rehearse faults",
        ),
    ),
    "gpu": (
        (
            "product",
            "text",
            "",
            "required",
            "the part, by its key in the catalogue or any other of its [names](gpu-names.md)",
        ),
        ("count", "whole number", "1 to 64", "1", "equal GPUs"),
        ("model", "text", "a name as above", "the part's", "the model that the node reports, if another"),
        (
            "mig",
            "list of text",
            "profiles and places of the part",
            "MIG is off",
            "`profile@start` for each GPU instance, such as `3g@4`; an empty list turns MIG on without instances",
        ),
        ("sensor_gain", "number", "0.5 to 2", "1", "the power sensor reads this times the true power"),
        ("sensor_offset_w", "number", "-50 to 50", "0", "and so many watts more"),
    ),
}
_KINDS = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "message": "mapping",
    "mapping": "mapping of text",
}


def _kind(shape: ValueShape) -> str:
    """The type of a value in words; an enumeration is its names."""
    if shape.kind == "enum":
        return ", ".join(f"`{member.name.lower()}`" for member in shape.type if member)
    if shape.kind == "many" and shape.item is not None:
        plural = {"str": "texts", "message": "mappings"}
        return f"list of {plural[shape.item.kind]}"
    return _KINDS[shape.kind]


def _number(value: float) -> str:
    """A bound as people write it."""
    if value >= 1e15 and value.is_integer() and int(value) & (int(value) - 1) == 0:
        return f"2^{int(value).bit_length() - 1}"
    return (
        f"{value:.0f}"
        if value.is_integer() and abs(value) < 1e9
        else re.sub(r"e([+-])0*", r"e\1", f"{value:g}").replace("e+", "e")
    )


def _limits(shape: ValueShape) -> str:
    """The range of a value, with its unit."""
    rule = shape.rule
    found = []
    if isinstance(rule, Range):
        found.append(f"{_number(float(rule.low))} to {_number(float(rule.high))} {rule.unit}".strip())
    elif isinstance(rule, Many):
        found.append(f"up to {rule.most}")
    elif isinstance(rule, Text):
        found.append(f"up to {rule.longest} characters")
        if rule.shape and "printable" not in rule.shape:
            found.append(rule.shape)
    if shape.kind == "many" and shape.item is not None and isinstance(shape.item.rule, Text):
        found.append(f"each {_limits(shape.item)}")
    return "; ".join(found)


def _default(cls: Any, entry: SchemaField) -> str:
    """What a field is if it is not written."""
    if entry.required:
        return "required"
    (field,) = (one for one in fields(cls) if one.name == entry.name)
    if field.default is MISSING or field.default is None or field.default in ("", ()):
        return "none"
    if entry.shape.kind == "enum":
        return f"`{field.default.name.lower()}`"
    if entry.shape.kind == "bool":
        return str(field.default).lower()
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| field | type | limits | default | meaning |", "|---|---|---|---|---|"]
    lines += ["| `" + "` | ".join([row[0], " | ".join(map(_cell, row[1:]))]) + " |" for row in rows]
    return "\n".join(lines)


def message_table(cls: Any) -> str:
    """The fields of a message; raises ValueError where MEANINGS and the message differ."""
    entries, meanings = fields_of(cls), MEANINGS[cls]
    if {entry.name for entry in entries} != set(meanings):
        raise ValueError(f"MEANINGS of {cls.__name__} are not those of its fields")
    rows = [
        (entry.name, _kind(entry.shape), _limits(entry.shape), _default(cls, entry), meanings[entry.name])
        for entry in entries
    ]
    return _table(rows)


_WORKLOADS = """What `eelctl submit -f FILE` reads; `eelctl whatif -f` and `capacity -f` read the same. The file is YAML (so
JSON, too), with one workload per document and `---` between documents, up to 10,000. All of it is read before anything is
sent: a mistake is named with document, field and remedy, and nothing is submitted. A field that is not on this page is
refused. `-` is standard input.

```yaml
name: bert
request: {cpu: 8, memory: 32GiB, gpus: 1}
```

`eelctl submit --dry-run -f FILE` shows where the work would go and changes nothing. What `eelctl get -o yaml` prints can
be submitted again: phase, placements and whatever else the controller adds are left out.

A workload is a request for places. [Who starts its processes](../how-to/install-bare-metal.md#start-processes-where-work-is-placed)
depends on the engine. On Kubernetes, describe work by pods and [annotations](annotations.md) instead.
"""
_IDENTIFIER = """Beside these fields, `id` (or `workload_id`; up to 128 letters, digits and `.` `_` `/` `-`) gives the workload
its id: submitting the same file again then changes nothing. Without one the controller chooses.
Ids that begin like those of an engine's own jobs are refused where it is connected: `slurm-`, `flux-`, and with Kubernetes `pod-`,
`gang-` and `service-`."""
_AMOUNTS = """Write amounts as people do, with their unit; each stands for a field of the contract, and only one of the two
may be written:

| write | for example | instead of |
|---|---|---|
| `cpu` | `8`, `2.5`, `2500m` | `cpu_milli` |
| `memory` | `16GiB` (or `16Gi`), `16GB`; also k, M, T | `memory_bytes` |
| `gpus` | `2` | `gpu_count` |
| `gpu_share` | `0.5`, `50%` | `gpu_milli` |

A request asks for CPU, memory or a GPU. Several GPUs are whole, and all on one node."""
_ARRAY = """`array: 0-9%2` is short for `array: {indexes: 0-9%2}`. What a command of it finds, and how to see, change and wait
for all of it: [jobs](../how-to/jobs.md#arrays-and-sweeps). The `id` is the array's; its elements have it with `_` and the
index behind.

```yaml
name: train
request: {gpus: 1}
mobility: fixed
process: {argv: [python, train.py, --lr, "{lr}"], working_directory: /work}
array: {parameters: ["lr=0.1,0.01", seed=0-3], indexes: "%2"}
```"""
_SERVICE = """```yaml
id: chat
name: chat
kind: inference_service
replicas: 2
namespace: research
labels: {team: vision}
locality: spread
request: {cpu: 8, memory: 64GiB, gpus: 1, gpu_models: [h100, a100-sxm4-80gb]}
service:
  profile: chat-8b
  rate_hz: 12
  objectives:
    - {metric: first_token, latency_s: 0.5}
    - {metric: inter_token, latency_s: 0.05, quantile: 0.99}
  output_tokens: 250
  replicas_least: 1
  replicas_most: 16
  start_s: 45
  metrics: {server: vllm, url: "http://{node}:8000/metrics"}
---
name: summaries
kind: inference_service
request: {cpu: 8, memory: 64GiB, gpus: 1}
service:
  load_target: {metric: tokens, per_replica: 2500}
  replicas_most: 8
  metrics: {server: vllm, url: "http://{node}:8000/metrics"}
---
name: rank
kind: inference_service
request: {cpu: 2, memory: 8GiB, gpus: 1, gpu_share: 25%}
```"""
_TRAINING = """```yaml
name: resnet
kind: training_job
replicas: 4
mobility: restartable
priority: 10
request: {cpu: 32, memory: 256GiB, gpus: 8}
training:
  slowdown_most: 0.05
  work_unit: step
  metrics: {server: generic, url: "http://{node}:9400/metrics", work_counter: steps_total}
---
name: finetune
kind: training_job
request: {cpu: 8000m, memory: 64GiB, gpus: 2}
training: {work: 12000, deadline_ns: 1801411200000000000}
```

Exactly one of `slowdown_most`, `deadline_ns` with `work`, and `energy_weight`. It needs whole GPUs. The job reports its
progress through `metrics`, `eelctl progress`, or [a line in its loop](../how-to/promises.md#set-an-objective-for-a-training-job).
An elastic job has both bounds of replicas and a profile with a point for each number: [elastic jobs](../explanation/elastic.md)."""
_FLEET = """What `eelgrid-agent --simulate FILE` reads: the nodes that one agent simulates, with the catalogue's GPUs. The
same file serves `eelgrid-agent mig --simulate`. It is TOML if its name ends in `.toml`, else JSON; at most 16 MiB and
20,000 nodes. A field that is not on this page is refused, with its place in the file.

```json
{"nodes": [
  {"name": "gpu-{index}", "count": 3, "cpu_milli": 192000, "memory_bytes": 2199023255552,
   "pool": "a", "labels": {"owner": "research"}, "topology": "zone-a/spine-2/rack-7",
   "gpus": [{"product": "h100-sxm5-80gb", "count": 8}]},
  {"name": "mixed", "cpu_milli": 64000, "memory_bytes": 549755813888, "driver_version": "570.86.15",
   "gpus": [{"product": "a100-sxm4-40gb", "mig": ["3g@4", "1g.5gb@0"], "sensor_gain": 0.954},
            {"product": "a10", "model": "Homegrown", "count": 2}]}
]}
```

```toml
[[nodes]]
name = "gpu-{index}"
count = 2
cpu_milli = 96000
memory_bytes = 412316860416

[[nodes.gpus]]
product = "a100-sxm4-80gb"
count = 4
```

The file has one field, `nodes`, a list. The agent's own `--node-name`, `--pool`, `--label` and `--topology` are for a real
node: in a fleet they are fields."""
_ELSEWHERE = """Commands that imagine a cluster read the cluster that runs, and change a copy. Their files describe changes, or
the nodes of a trace:

| command | file | format |
|---|---|---|
| `eelctl whatif`, `eelctl capacity` | `--changes FILE` | a list of changes, below |
| `eelctl whatif`, `eelctl capacity` | `-f FILE` | [the workload file](workload-file.md) |
| `eelctl replay` | `--trace FOLDER` | `nodes.csv` and `tasks.csv`: [trace format](trace-format.md) |
| `eelctl frontier` | services and GPUs, and measured points | [frontier](../how-to/frontier.md#files) |
| `eelgrid-agent` | `--faults FILE` | a line per fault of a simulated GPU: `{"fault": "lose", "gpu": 0, "node": "gpu-1"}` |
"""
_CHANGES = """A list of up to 64 changes, in YAML or JSON, made in the order of the file before those of the flags. Each is one
kind and its fields. Added nodes and copies are 10,000 at most.

```yaml
- AddNodes: {count: 2, shape: {gpu: h100-sxm5-80gb, gpu_count: 8, cpu_milli: 192000}}
- AddNodes: {count: 1, shape: {like_node: gpu-1}}
- DrainNodes: {node_names: [gpu-2], remove: true}
- SetWeights: {objective: energy}
- SetPowerBudgets: {budgets: [{scope: cluster, limit_w: 200000}]}
- CancelWorkloads: {workload_ids: [train]}
- PlaceAnew: {}
- SubmitCopies: {copies: 5, spec: {name: train, request: {gpus: 8, cpu: 64, memory: 256GiB}}}
```"""


def _flowing(text: str) -> str:
    """Prose with one line per paragraph; fenced blocks, tables and lists keep their lines."""
    parts, fenced = [], False
    for paragraph in text.strip().split("\n\n"):
        keeps = fenced or paragraph.startswith(("```", "|", "- "))
        if paragraph.count("```") % 2:
            fenced = not fenced
        parts.append(paragraph if keeps else " ".join(paragraph.split("\n")))
    return "\n\n".join(parts)


def _page(title: str, *parts: str) -> str:
    head = HEAD.format(source="the programs and `docs/file_pages.py`").strip()
    return "\n\n".join([f"# {title}", head, *map(_flowing, parts)]) + "\n"


def workload_file_page() -> str:
    """The page of the file that `eelctl submit -f` reads."""
    return _page(
        "Workload file",
        _WORKLOADS,
        "## A workload",
        message_table(WorkloadSpec),
        _IDENTIFIER,
        "## request",
        _AMOUNTS,
        message_table(ResourceRequest),
        "## process",
        "For a `batch_job` or a `training_job` that agents run themselves, as `eelctl run` submits it.",
        message_table(ProcessSpec),
        "### terminal_size",
        message_table(TerminalSize),
        "## schedule",
        "How these work together: [jobs](../how-to/jobs.md).",
        message_table(JobSchedule),
        "### after",
        message_table(JobDependency),
        "## array",
        _ARRAY,
        message_table(JobArrayRequest),
        "## deadline",
        "Whether it can be kept is decided at submission: [deadlines](../how-to/deadlines.md).",
        message_table(JobDeadline),
        "## gpu_preference",
        "What is preferred is taken only if there is room now: nothing waits for it, and nobody is preempted for it. All "
        "replicas go to preferred models, or all go wherever they cost least. Moves keep work on the models that it prefers.",
        message_table(GpuPreference),
        "## model_data",
        "A preference as well, after that for GPU models: [model data on disk](../how-to/model-data.md).",
        message_table(ModelData),
        "## gpu_sharing",
        "Who shares a GPU with whom: [share a GPU](../how-to/gpu-sharing.md#limit-how-far-work-is-slowed-down).",
        message_table(GpuSharing),
        "## gang",
        "What starts together, and what else: [gangs](../how-to/jobs.md#gangs).",
        message_table(GangPart),
        "## service",
        "For `kind: inference_service`; without it nothing is scaled. How to choose the values: "
        "[objectives and budgets](../how-to/promises.md).",
        _SERVICE,
        message_table(ServicePromise),
        "### objectives",
        message_table(LatencyObjective),
        "### load_target",
        "Replicas follow the load, and no profile is needed: [load targets](../how-to/promises.md#let-replicas-follow-a-load).",
        message_table(LoadTarget),
        "## training",
        "For `kind: training_job`; without it no power limit is searched for.",
        _TRAINING,
        message_table(TrainingPromise),
        "## metrics",
        "The page of a replica's own metrics, in Prometheus' text format, of a service or a job. "
        "[Which addresses are read](controller.md#scraping-of-services).",
        message_table(MetricsSource),
    )


def fleet_file_page() -> str:
    """The page of the file that `--simulate` reads, and of other files that describe nodes."""
    changes = [
        part
        for cls in (
            AddNodes,
            NodeShape,
            DrainNodes,
            SetWeights,
            Weights,
            SetPowerBudgets,
            PlaceAnew,
            SubmitCopies,
            CancelWorkloads,
        )
        for part in (
            f"### {cls.__name__}",
            message_table(cls) if MEANINGS[cls] else "Places all work again from an empty cluster. It has no field.",
        )
    ]
    return _page(
        "Fleet file",
        _FLEET,
        "## Nodes",
        _table(FLEET_FIELDS["node"]),
        "## GPUs",
        _table(FLEET_FIELDS["gpu"]),
        "## Files of other commands",
        _ELSEWHERE,
        "## Changes",
        _CHANGES,
        *changes,
    )

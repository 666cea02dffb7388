"""Model data: what agents find on their disks, and that work goes to it where there is room, or for so many watts more."""

import asyncio
import errno
import logging
import threading
from dataclasses import replace
from pathlib import Path

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders.agent import ManualClock, build_agent_node, build_devices
from tests.builders.cluster import build_core, build_node, build_request
from tests.unit.decision_test import Recorder
from tests.unit.whatif_test import imagined
from tests.waiting import wait_until

from eelgrid_agent.node import model_data
from eelgrid_agent.node.inventory import DeviceSurvey
from eelgrid_agent.node.model_data import list_model_data, watch_model_data
from eelgrid_controller.cli.preferences import build_model_data
from eelgrid_controller.engines.kubernetes.model import annotations
from eelgrid_controller.engines.kubernetes.model.quantities import AnnotationUnreadable
from eelgrid_controller.placement.migration_planner import build_migration_problem, recommend_moves
from eelgrid_controller.whatif.decision_record import replay_decision
from eelgrid_protos.messages import (
    MODEL_DATA_MOST,
    AddNodes,
    GpuPreference,
    ModelData,
    NodeShape,
    RecommendMovesRequest,
    SubmitCopies,
    WorkloadPhase,
)
from eelgrid_protos.schema import InvalidMessage, check_message

LLAMA = ModelData(data_names=("llama",))


def nodes_of(core, key="job"):
    return [place.node_name for place in core.workload(key).placements]


def place(core, key="job", **spec):
    core.submit(build_request(key, **spec), now_ns=9)
    return nodes_of(core, key)


def build_two(**first):
    return build_core(build_node("a", model_data=("llama", "qwen")), build_node("b", **first))


def cost_of(core, key="job"):
    return core.explain_workload(key).replicas[0].candidates[0].cost_w


def test_work_goes_to_a_node_that_has_its_data_and_elsewhere_once_that_is_full():
    for first, second in (("a", "b"), ("b", "a")):
        core = build_core(*(build_node(name, model_data=("llama",) if name == first else ()) for name in ("a", "b")))
        assert [place(core, f"job{n}", model_data=LLAMA) for n in range(4)] == [[first], [first], [second], [second]]


def test_a_node_must_have_all_of_it():
    both = ModelData(data_names=("llama", "qwen"))
    core = build_core(build_node("a", model_data=("llama",)), build_node("b", model_data=("llama", "qwen")))
    assert place(core, model_data=both) == ["b"]
    (replica,) = core.explain_workload("job").replicas
    assert [(one.constraint, one.nodes) for one in replica.removals] == [("model_data", 1)]
    # Where no node has all of it, it is as if nothing was said.
    plain, lone = build_two(), build_two()
    assert place(plain) == place(lone, model_data=ModelData(data_names=("llama", "phi")))
    assert cost_of(plain) == cost_of(lone)


def test_replicas_that_do_not_all_fit_near_their_data_go_where_they_cost_least():
    found = [
        place(build_core(build_node("a", gpus=2, model_data=("llama",)), build_node("b", gpus=4)), replicas=3, **spec)
        for spec in ({"model_data": LLAMA}, {})
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_data_that_come_to_a_node_and_leave_it_count_from_the_next_decision_on():
    core = build_core(build_node("a", gpus=4), build_node("b", gpus=4))
    for number, (first, second) in enumerate([((), ("llama",)), (("llama",), ()), ((), ("llama",))], start=1):
        for name, data in (("a", first), ("b", second)):
            core.register_node(build_node(name, gpus=4, model_data=data, generation=1 + number), now_ns=number)
        assert place(core, f"job{number}", model_data=LLAMA) == ["a" if first else "b"]


def test_a_preferred_gpu_model_counts_before_model_data():
    def build():
        return build_core(
            build_node("near", model="G2", model_data=("llama",)),
            build_node("far", model="G3"),
            build_node("both", model="G3", gpus=1, model_data=("llama",)),
        )

    core, rather = build(), GpuPreference(models=("G3",))
    found = [place(core, f"job{n}", gpu_preference=rather, model_data=LLAMA) for n in range(4)]
    assert found == [["both"], ["far"], ["far"], ["near"]]


@given(
    nodes=st.lists(
        st.tuples(st.sampled_from(["G2", "G3", "T4"]), st.integers(1, 3), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    worth_w=st.sampled_from([None, 0.0, 5.0, 40.0, 200.0]),
    gpus=st.integers(1, 2),
)
@settings(deadline=None, max_examples=150)
def test_the_choice_is_the_least_cost_less_what_a_node_with_the_data_is_worth(nodes, worth_w, gpus):
    def build():
        core = build_core(
            *(
                build_node(f"n{n}", gpus=count, model=model, model_data=("llama",) if has else ())
                for n, (model, count, _, has) in enumerate(nodes)
            )
        )
        for number, (_, count, used, _) in enumerate(nodes):
            others = [f"n{n}" for n in range(len(nodes)) if n != number]
            for name in others:
                core.cordon_node(name, now_ns=2)
            for one in range(min(used, count)):
                core.submit(build_request(f"w{number}-{one}"), now_ns=3)
            for name in others:
                core.uncordon_node(name, now_ns=4)
        return core

    if gpus > max(count for _, count, _, _ in nodes):
        return
    core = build()
    core.submit(build_request("job", gpus=gpus, model_data=ModelData(data_names=("llama",), worth_w=worth_w)), now_ns=9)
    plain = build()
    plain.submit(build_request("job", gpus=gpus), now_ns=9)
    assert core.workload("job").phase is plain.workload("job").phase
    if core.workload("job").phase is WorkloadPhase.PENDING:
        assert core.workload("job").reason == plain.workload("job").reason
        return
    has = {f"n{n}": row[3] for n, row in enumerate(nodes)}
    (chosen,), (cheapest,) = nodes_of(core), nodes_of(plain)
    costs = {one.node_name: one.cost_w for one in plain.explain_workload("job").replicas[0].candidates}
    near = [costs[name] for name in costs if has[name]]
    if not near:
        assert chosen == cheapest
    elif worth_w is None:
        assert has[chosen]
    else:
        assert has[chosen] == (has[cheapest] or min(near) - worth_w <= costs[cheapest] + 1e-6)


def test_a_node_that_is_added_like_another_has_none_of_its_data():
    core = build_core(build_node("a", gpus=1, model_data=("llama",)), build_node("b", gpus=4, model="T4"))
    core.submit(build_request("near", model_data=LLAMA), now_ns=2)
    core.submit(build_request("far"), now_ns=2)
    assert (nodes_of(core, "near"), nodes_of(core, "far")) == (["a"], ["b"])
    change = AddNodes(shape=NodeShape(like_node="a"), count=1)
    (found,) = imagined(core, change, SubmitCopies(spec=build_request(model_data=LLAMA).spec)).differences
    # The node that is awake costs less than one that is new.
    assert found.nodes_after == ("b",)


@pytest.mark.parametrize("loads", [False, True])
def test_moves_leave_work_on_a_node_that_has_its_data(loads):
    """Two halves of GPUs join, unless each is where its data are."""
    core = build_core(build_node("a", gpus=1, model_data=("llama",)))
    data = LLAMA if loads else None
    core.submit(build_request("one", milli=500, model_data=data), now_ns=1)
    core.submit(build_request("gap", milli=500), now_ns=1)
    core.register_node(build_node("b", gpus=1, model_data=("llama",)), now_ns=1)
    core.register_node(build_node("c", gpus=1, cpu=1), now_ns=1)
    core.submit(build_request("two", milli=500, cpu=2, model_data=data), now_ns=1)
    core.cancel("gap", now_ns=2)
    assert (nodes_of(core, "one"), nodes_of(core, "two")) == (["a"], ["b"])
    survey = core.survey_moves(RecommendMovesRequest(moves_ratio=1.0, moves_most=5))
    assert len(recommend_moves(build_migration_problem(survey)).moves) == (not loads)


def test_a_decision_by_model_data_replays_to_the_last_bit():
    rig = Recorder(build_node("a", model="G3", gpus=1, model_data=("llama",)), build_node("b", model="G2", gpus=4))
    for n in range(3):
        rig.do(rig.core.submit, build_request(f"job{n}", model_data=LLAMA))
        assert replay_decision(rig.exported(f"job{n}")).differences == ()
    assert [nodes_of(rig.core, f"job{n}") for n in range(3)] == [["a"], ["b"], ["b"]]


@pytest.mark.parametrize(
    ("found", "what"),
    [
        (ModelData(), "data_names: is empty"),
        (ModelData(data_names=("",)), "data_names"),
        (ModelData(data_names=tuple(map(str, range(17)))), "data_names"),
        (replace(LLAMA, worth_w=-1.0), "worth_w"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_field(found, what):
    with pytest.raises(InvalidMessage, match=what):
        check_message(build_request("job", model_data=found))


def test_the_options_are_names_and_what_they_are_worth():
    assert build_model_data({"model_data": "", "model_data_worth": None}) is None
    found = build_model_data({"model_data": "meta-llama/Llama-3.1-8B, qwen,", "model_data_worth": 40.0})
    assert found == ModelData(data_names=("meta-llama/Llama-3.1-8B", "qwen"), worth_w=40.0)
    with pytest.raises(click.UsageError, match="--model-data-worth needs --model-data"):
        build_model_data({"model_data": " ", "model_data_worth": 40.0})


def test_a_pod_says_it_by_annotations():
    key, worth = "eelgrid.io/model-data", "eelgrid.io/model-data-worth-watts"
    parse = annotations.parse_model_data
    assert parse({}) is None
    assert parse({key: "meta-llama/Llama-3.1-8B, qwen, qwen"}) == ModelData(
        data_names=("meta-llama/Llama-3.1-8B", "qwen")
    )
    assert parse({key: "llama", worth: "40.5"}) == replace(LLAMA, worth_w=40.5)
    for wrong in ({worth: "40"}, {key: "llama", worth: "much"}, {key: ""}):
        with pytest.raises(AnnotationUnreadable):
            parse(wrong)


# On the node


def fetch(folder, name, *blobs):
    """Lays out a model as Hugging Face's client does."""
    revision = folder / name / "snapshots" / "5f0b02c75b57c5855da9ae460ce51323ea669d8a"
    revision.mkdir(parents=True)
    (folder / name / "blobs").mkdir()
    for blob in blobs:
        (folder / name / "blobs" / blob).touch()
    return revision


def test_what_lies_whole_in_a_folder_is_told_by_its_name(tmp_path):
    hub, plain = tmp_path / "hub", tmp_path / "plain"
    (fetch(hub, "models--meta-llama--Llama-3.1-8B", "0a1b") / "model.safetensors").touch()
    (fetch(hub, "models--gpt2", "0a1b") / "model.safetensors").touch()
    (fetch(hub, "datasets--squad", "0a1b") / "train.json").touch()
    # One that is being fetched, one that was not begun, and one whose fetch failed before there was anything.
    (fetch(hub, "models--org--partly", "0a1b", "0c.incomplete") / "model.safetensors").touch()
    fetch(hub, "models--org--begun")
    (hub / "models--org--empty").mkdir()
    (hub / ".locks").mkdir()
    plain.mkdir()
    for name in ("my--mistral.gguf", "llama.gguf.part", "x" * 254, "two\nlines"):
        (plain / name).touch()
    (plain / "phi-4").mkdir()
    found = list_model_data((hub, plain, tmp_path / "none"))
    assert found.names == ("datasets/squad", "gpt2", "meta-llama/Llama-3.1-8B", "my--mistral.gguf", "phi-4")
    assert found.problems == (f"{tmp_path / 'none'}: No such file or directory",)


def test_a_model_that_may_not_be_looked_at_costs_no_other(tmp_path, monkeypatch):
    for name in ("models--one", "models--locked", "models--two"):
        (fetch(tmp_path, name, "0a1b") / "model.safetensors").touch()

    def deny(real):
        def call(path, *arguments, **options):
            if "models--locked" in str(path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *arguments, **options)

        return call

    # Root may look at everything.
    for method in ("iterdir", "stat"):
        monkeypatch.setattr(Path, method, deny(getattr(Path, method)))
    assert list_model_data((tmp_path,)) == (("one", "two"), ())


def test_more_names_than_a_node_tells_are_left_out_in_order(tmp_path):
    for number in range(MODEL_DATA_MOST + 1):
        (tmp_path / f"{number:04}").touch()
    found = list_model_data((tmp_path,))
    assert found.names == tuple(f"{number:04}" for number in range(MODEL_DATA_MOST))
    assert found.problems == (
        f"{MODEL_DATA_MOST + 1} model data, of which the first {MODEL_DATA_MOST} by name are told",
    )


def test_changes_are_told_and_a_disk_that_hangs_keeps_what_was_found(tmp_path, monkeypatch, caplog):
    told, answers = [], threading.Event()
    monkeypatch.setattr(model_data, "_SLOW_S", 0.01)
    answers.set()

    def look(folders):
        answers.wait()
        return list_model_data(folders)

    async def scene():
        monkeypatch.setattr(model_data, "list_model_data", look)
        watching = asyncio.create_task(watch_model_data((tmp_path,), told.append, every_s=0.01))
        await wait_until(lambda: told)
        answers.clear()
        (tmp_path / "llama").mkdir()
        await wait_until(lambda: "event=model_data_slow" in caplog.text)
        before = list(told)
        answers.set()
        await wait_until(lambda: told[-1] == ("llama",))
        watching.cancel()
        return before

    with caplog.at_level(logging.WARNING):
        assert set(asyncio.run(scene())) <= {(), ("llama",)}


def test_a_node_tells_its_controller_once_for_each_change():
    clock = ManualClock()
    node = build_agent_node(build_devices(clock), clock)
    woken = []
    node.wake = lambda: woken.append(node.inventory)
    for names in ((), ("llama",), ("llama",), ()):
        node.update_model_data(names)
    assert [one.model_data for one in woken] == [("llama",), ()]
    assert [one.generation for one in woken] == [2, 3]
    # What a survey finds later leaves it as it is.
    node.update_model_data(("llama",))
    node.update_inventory(DeviceSurvey())
    assert node.inventory.model_data == ("llama",)

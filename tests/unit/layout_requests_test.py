"""What a file or a flag wants of a node: which entry speaks of which GPU, where instances go, when it holds."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_agent.enforce.mig.layout import PciId, read_layout, resolve_layout
from eelgrid_agent.enforce.mig.layout_requests import (
    BoardUnknown,
    InvalidLayoutText,
    MigSubject,
    NoSuchGpu,
    UnsupportedLayout,
    count_mig_devices,
    export_parted_file,
    find_unmet_entries,
    find_unmet_requests,
    requests_from_entries,
    requests_from_texts,
)
from eelgrid_agent.enforce.mig.parted_file import format_parted_file, parse_parted_file
from eelgrid_agent.simulation.node import SimulatedNode
from eelgrid_agent.simulation.spec import PCI_DEVICE_IDS, GpuSpec, MigSlice, NodeSpec
from eelgrid_protos.catalogue.loader import load_catalogue

A100, H100, T4 = "a100-sxm4-40gb", "h100-sxm5-80gb", "t4"


def part(text):
    """3g@4, or 3g@4:2,1 with shares."""
    place, _, shares = text.partition(":")
    profile, _, start = place.partition("@")
    slices = tuple(map(int, shares.split(","))) if shares else None
    return MigSlice(profile=profile, start=int(start), compute_slices=slices)


def node(*gpus, boards=True):
    """Subjects of a node; a GPU is a product, or a product and its instances."""
    specs = [
        GpuSpec(product=gpu) if isinstance(gpu, str) else GpuSpec(product=gpu[0], mig=tuple(map(part, gpu[1:])))
        for gpu in gpus
    ]
    spec = NodeSpec(node_name="n", cpu_milli=1, memory_bytes=1, gpus=tuple(specs))
    simulated = SimulatedNode(spec, monotonic_ns=lambda: 0, seed=1)
    return tuple(
        MigSubject(
            gpu=gpu,
            geometry=load_catalogue().products[gpu.catalogue_key].mig,
            board=PciId(PCI_DEVICE_IDS[gpu.catalogue_key], 0x10DE, (1, 2)) if boards else None,
        )
        for gpu in simulated.gpus()
    )


def config(text):
    return parse_parted_file(f"version: v1\nmig-configs:\n  x:\n{text}", "f").get_config(None)[1]


def entry(devices="all", counts="{}", board="", enabled="true"):
    filtered = f"device-filter: '{board}', " if board else ""
    return f"  - {{{filtered}devices: {devices}, mig-enabled: {enabled}, mig-devices: {counts}}}\n"


def placed(wishes):
    return {
        wish.subject.gpu.index: [(i.profile, i.start, i.compute_slices) for i in wish.layout.instances]
        for wish in wishes
    }


def test_the_last_entry_that_speaks_of_a_gpu_wins():
    subjects = node(A100, A100, H100)
    entries = config(
        entry(enabled="false") + entry("[0, 1, 9]", "{7g.40gb: 1}", "0x20B010DE") + entry("[1]", "{3g.20gb: 1}")
    )
    wishes = requests_from_entries(entries, subjects)
    assert placed(wishes) == {0: [("7g.40gb", 0, ())], 1: [("3g.20gb", 4, ())], 2: []}
    assert [wish.layout.mig_enabled for wish in wishes] == [True, True, False]
    assert wishes[1].because == "f:6: mig-configs.x[2]"


def test_who_is_not_spoken_of_is_left_alone():
    assert placed(requests_from_entries(config(entry("[1]", "{1g.5gb: 1}")), node(A100, A100))) == {
        1: [("1g.5gb", 6, ())]
    }
    assert requests_from_entries(config(entry(board="0x233010DE")), node(A100)) == ()


def test_gpus_without_mig_are_passed_over_unless_they_are_named():
    assert placed(requests_from_entries(config(entry()), node(T4, A100))) == {1: []}
    assert requests_from_entries(config(entry("[0]", enabled="false")), node(T4)) == ()
    with pytest.raises(UnsupportedLayout, match=r"f:4: mig-configs.x\[0\].devices: GPU 0 \(Tesla T4\) has no MIG"):
        requests_from_entries(config(entry("[0]")), node(T4))


def test_a_filter_needs_a_board():
    subjects = node(A100, boards=False)
    with pytest.raises(BoardUnknown, match="the PCI id of GPU 0 cannot be read; read it with lspci"):
        requests_from_entries(config(entry(board="0x20B010DE")), subjects)
    assert placed(requests_from_entries(config(entry()), subjects)) == {0: []}
    assert requests_from_entries(config(entry("[1]", board="0x20B010DE")), subjects) == ()


def test_the_name_of_another_part_is_refused_with_the_names_of_this_one():
    with pytest.raises(
        UnsupportedLayout, match=r"1g.5gb: NVIDIA H100 80GB HBM3 \(GPU 0\) has no such profile; on this part"
    ):
        requests_from_entries(config(entry(counts="{1g.5gb: 7}")), node(H100))
    with pytest.raises(UnsupportedLayout, match="cannot exist together on a100-40gb"):
        requests_from_entries(config(entry(counts="{3g.20gb: 2, 1g.5gb: 1}")), node(A100))
    with pytest.raises(UnsupportedLayout, match=r"5c.7g.40gb: there is no such share; 7g.40gb holds shares of 1, 2"):
        requests_from_entries(config(entry(counts="{5c.7g.40gb: 1}")), node(A100))


def test_what_a_name_means_follows_from_the_sizes_where_the_driver_prints_another():
    """Some drivers print 1g.24gb on a GB200 and others 1g.23gb; mig-parted counts by size."""
    assert placed(requests_from_texts(["0=1g.23gb"], node("gb200"))) == {0: [("1g.23gb", 6, ())]}
    (subject,) = node("gb200")
    renamed = {
        key: replace(profile, name=profile.name.replace("23gb", "24gb"))
        for key, profile in subject.geometry.profiles.items()
    }
    other = replace(subject, geometry=replace(subject.geometry, profiles=renamed))
    assert placed(requests_from_texts(["0=1g.23gb@0,1g.24gb@1"], (other,))) == {
        0: [("1g.24gb", 0, ()), ("1g.24gb", 1, ())]
    }


def test_shares_are_packed_and_what_stands_stays():
    (subject,) = subjects = node((A100, "3g@0:1,1", "1g@4"))
    shares = requests_from_texts(["all=3x1c.3g.20gb,1g.5gb"], subjects)
    assert placed(shares) == {0: [("3g.20gb", 0, (1, 1, 1)), ("1g.5gb", 4, ())]}
    # Exactly what stands, however it is packed, is what stands.
    assert placed(requests_from_texts(["all=2x1c.3g.20gb,1g.5gb"], subjects)) == {
        0: [("3g.20gb", 0, (1, 1)), ("1g.5gb", 4, ())]
    }
    assert placed(requests_from_texts([f"{subject.gpu.uuid}=1c.3g.20gb@4,2c.3g.20gb@4"], subjects)) == {
        0: [("3g.20gb", 4, (2, 1))]
    }


def test_places_may_be_given_for_some():
    assert placed(requests_from_texts(["0=1g.5gb@0,3g.20gb"], node(A100))) == {
        0: [("1g.5gb", 0, ()), ("3g.20gb", 4, ())]
    }
    assert placed(requests_from_texts(["0=3g.20gb@0,2x1g.5gb"], node(A100))) == {
        0: [("3g.20gb", 0, ()), ("1g.5gb", 4, ()), ("1g.5gb", 5, ())]
    }


def test_instances_in_use_are_kept_where_they_are():
    (subject,) = node((A100, "1g@0", "1g@3", "2g@4"))
    held = subject.gpu.gpu_instances[0].id
    for instance in subject.gpu.gpu_instances:
        held = instance.id if instance.start == 3 else held
    wishes = requests_from_texts(["0=1g.5gb,3g.20gb"], (replace(subject, busy=frozenset({held})),))
    assert placed(wishes) == {0: [("1g.5gb", 3, ()), ("3g.20gb", 4, ())]}


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0", InvalidLayoutText, "requests no layout; write GPU=off"),
        ("0=", InvalidLayoutText, "'' is not a MIG device"),
        ("0=1g.5gb,", InvalidLayoutText, "'' is not a MIG device"),
        ("0=3g@4", InvalidLayoutText, "'3g@4' is not a MIG device"),
        ("0=1g.5gb@", InvalidLayoutText, "is not a MIG device"),
        ("0=1g.5gb@x", InvalidLayoutText, "is not a MIG device"),
        ("7=off", NoSuchGpu, "there is no GPU '7'; name one by its UUID or index: 0, 1, or all"),
        ("1=empty", UnsupportedLayout, "GPU 1 .Tesla T4. has no MIG; leave it out"),
        ("0=3g.20gb@1", UnsupportedLayout, "3g.20gb cannot start at 1; it starts at 0, 4"),
        ("0=99x1g.5gb", UnsupportedLayout, "99 MIG devices; ask for at most 64"),
        ("0=8x1g.5gb", UnsupportedLayout, "are 8; a100-40gb holds 7 at most"),
        ("0=2c.3g.20gb@4,2c.3g.20gb@4", UnsupportedLayout, "3g.20gb@4: cannot hold so many shares together"),
        ("0=1g.5gb@0,2g.10gb@0", UnsupportedLayout, "overlaps another instance"),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(text, error, message):
    with pytest.raises(error, match=message) as caught:
        requests_from_texts([text], node(A100, T4))
    assert str(caught.value).startswith(f"--layout {text}")
    assert caught.value.violation.remedy


def test_each_gpu_is_named_once():
    with pytest.raises(InvalidLayoutText, match="GPU 0 appears twice"):
        requests_from_texts(["0=off", "all=empty"], node(A100))
    with pytest.raises(NoSuchGpu, match="no GPU of this node has MIG"):
        requests_from_texts(["all=off"], node(T4))


@pytest.mark.parametrize(
    ("gpus", "text", "reasons"),
    [
        ([(A100, "3g@4", "1g@0")], entry(counts="{3g.20gb: 1, 1g.5gb: 1}"), []),
        ([(A100, "3g@0", "1g@5")], entry(counts="{1c.1g.5gb: 1, 3g.20gb: 1}"), []),
        ([(A100, "3g@4:1,1")], entry(counts="{1c.3g.20gb: 2}"), []),
        ([(A100, "3g@4")], entry(counts="{3g.20gb: 2}"), ["GPU 0 has 1 of 3g.20gb; f:4"]),
        ([(A100, "3g@4")], entry(counts="{3g.40gb: 1}"), ["GPU 0 has 1 of 3g.20gb"]),
        ([(A100,)], entry(), []),
        ([(A100,)], entry(counts="{3g.20gb: 1}"), ["GPU 0 has no MIG device"]),
        ([A100], entry(enabled="false"), []),
        ([A100], entry(), ["GPU 0 has MIG off; f:4: mig-configs.x[0] wants it on"]),
        ([(A100,)], entry(enabled="false"), ["GPU 0 has MIG on"]),
        ([T4], entry(enabled="false"), []),
        # mig-parted asks MIG of every GPU that an entry speaks of, even one that has none.
        ([T4], entry(), ["GPU 0 has no MIG; f:4"]),
        ([A100, A100], entry("[0]", enabled="false"), ["GPU 1 is not covered"]),
        # The counts are those of the last entry, the mode that of every one.
        ([(A100, "3g@4")], entry(counts="{7g.40gb: 1}") + entry(counts="{3g.20gb: 1}"), []),
        ([(A100, "3g@4")], entry(enabled="false") + entry(counts="{3g.20gb: 1}"), ["GPU 0 has MIG on; f:4"]),
    ],
)
def test_when_a_configuration_holds(gpus, text, reasons):
    given_ = find_unmet_entries(config(text), node(*gpus))
    assert len(given_) == len(reasons), given_
    assert all(reason in line for reason, line in zip(reasons, given_, strict=True)), given_


def test_the_mode_alone():
    entries = config(entry(counts="{7g.40gb: 1}"))
    assert find_unmet_entries(entries, node((A100, "3g@4")), mode_only=True) == ()
    assert len(find_unmet_entries(entries, node(A100), mode_only=True)) == 1


def test_when_a_layout_holds():
    (subject,) = subjects = node((A100, "3g@4", "1g@0"))
    assert find_unmet_requests(requests_from_texts(["0=3g.20gb@4,1g.5gb@0"], subjects)) == ()
    assert find_unmet_requests(requests_from_texts(["0=3g.20gb,1g.5gb"], subjects)) == ()
    (reason,) = find_unmet_requests(requests_from_texts(["0=3g.20gb@4,1g.5gb@1"], subjects))
    assert reason == "GPU 0 has 1g.5gb@0,3g.20gb@4; --layout 0=3g.20gb@4,1g.5gb@1 differs"
    assert find_unmet_requests(requests_from_texts(["0=3g.20gb@4,1g.5gb@1"], subjects), mode_only=True) == ()
    assert len(find_unmet_requests(requests_from_texts(["0=off"], subjects), mode_only=True)) == 1
    assert subject.gpu.mig_enabled


def exported(*gpus, boards=True):
    return [
        (list(map(str, e.filters)), e.devices, e.mig_enabled, {str(name): n for name, n in e.mig_devices})
        for e in export_parted_file(node(*gpus, boards=boards), "now").configs["now"]
    ]


def test_alike_gpus_are_exported_together():
    half = (A100, "3g@4", "1g@0")
    assert exported(half, half) == [([], None, True, {"1g.5gb": 1, "3g.20gb": 1})]
    assert exported(half, A100, half) == [([], (0, 2), True, {"1g.5gb": 1, "3g.20gb": 1}), ([], (1,), False, {})]
    assert exported(half, T4, half, T4) == [
        (["0x20B010DE"], None, True, {"1g.5gb": 1, "3g.20gb": 1}),
        (["0x1EB810DE"], None, False, {}),
    ]
    assert exported(half, T4, A100) == [
        (["0x20B010DE"], (0,), True, {"1g.5gb": 1, "3g.20gb": 1}),
        (["0x1EB810DE", "0x20B010DE"], (1, 2), False, {}),
    ]
    assert exported(half, T4, boards=False) == [([], (0,), True, {"1g.5gb": 1, "3g.20gb": 1}), ([], (1,), False, {})]
    assert exported(A100, T4) == [([], None, False, {})]


SHAPES = [
    A100,
    T4,
    (A100,),
    (A100, "7g@0"),
    (A100, "4g@0", "3g@4:2,1"),
    (A100, "3g@0:1", "3g@4:1,1"),
    (H100, "1g.2x@2"),
    (H100, "2g@0:1,1", "1g+me@6"),
    ("rtx-pro-6000-blackwell-server", "1g-me@0", "1g+me.all@2", "1g+gfx@3"),
    ("a30", "2g@2", "1g@0"),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
def test_what_is_exported_stands_and_needs_no_step(gpus):
    subjects = node(*gpus)
    entries = parse_parted_file(format_parted_file(export_parted_file(subjects, "now")), "f").get_config("now")[1]
    # mig-parted itself holds that MIG cannot be asserted on where there is none; an export never asks for it.
    assert find_unmet_entries(entries, subjects) == ()
    wishes = requests_from_entries(entries, subjects)
    assert {w.subject.gpu.index for w in wishes} == {s.gpu.index for s in subjects if s.gpu.mig_capable}
    for wish in wishes:
        assert resolve_layout(wish.layout, wish.subject.geometry) == read_layout(wish.subject.gpu)
        assert sum(count_mig_devices(wish.subject.gpu, wish.subject.geometry).values()) == sum(
            len(i.compute_instances) for i in wish.subject.gpu.gpu_instances
        )

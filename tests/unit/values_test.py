"""Values behave as frozen dataclasses do."""

import copy
import dataclasses
import pickle

import pytest

from eelgrid_protos import messages, values
from eelgrid_protos.messages import ResourceRequest, WhoAmIRequest

CLASSES = [found for name in dir(messages) if dataclasses.is_dataclass(found := getattr(messages, name))]


@values.dataclass(frozen=True, slots=True)
class Pair:
    first: int
    unseen: int = dataclasses.field(default=0, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Stock:
    first: int
    unseen: int = dataclasses.field(default=0, compare=False, repr=False)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_is_frozen_has_slots_and_takes_its_comparison_from_values(cls):
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in vars(cls)
    assert cls.__eq__.__module__ == cls.__hash__.__module__ == values.__name__


def test_values_are_equal_where_their_class_and_fields_are():
    assert Pair(1) == Pair(1, unseen=2)
    assert Pair(1) != Pair(2)
    assert Pair(1) != Stock(1)
    assert ResourceRequest(cpu_milli=1, gpu_count=2) == ResourceRequest(cpu_milli=1, gpu_count=2)
    assert ResourceRequest(cpu_milli=1) != ResourceRequest(memory_bytes=1)
    assert WhoAmIRequest() == WhoAmIRequest()
    assert len({Pair(1), Pair(1, unseen=5), Pair(2)}) == 2


def test_values_are_told_copied_and_frozen_as_dataclasses():
    assert repr(Pair(3)) == repr(Stock(3)).replace("Stock", "Pair")
    value = ResourceRequest(gpu_count=2, gpu_models=("T4",))
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert dataclasses.replace(value, gpu_count=3).gpu_count == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.gpu_count = 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        del value.gpu_count

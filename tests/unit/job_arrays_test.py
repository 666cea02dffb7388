"""Arrays of jobs and sweeps: their elements against a slow twin, what they substitute, and what is refused."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eelgrid_controller.queueing.job_arrays import (
    parse_array,
    parse_job_array,
    parse_sweep,
)
from eelgrid_controller.state.array_elements import make_element_id
from eelgrid_protos.faults import InvalidArgument
from eelgrid_protos.messages import ARRAY_ELEMENTS_MOST, PARAMETERS_MOST, JobArrayRequest
from eelgrid_protos.quantities import Identifier

NAMES = st.lists(st.sampled_from(("lr", "seed", "width", "Depth")), unique=True, min_size=1, max_size=4)
# Braces and names of parameters inside of values must survive.
VALUES = st.lists(
    st.text("ab1{}.", max_size=4) | st.sampled_from(("{lr}", "{seed}")), unique=True, min_size=1, max_size=4
)


def list_indexes(text):
    return [element.index for element in parse_array(text).elements]


@pytest.mark.parametrize(
    ("text", "indexes", "limit"),
    [
        ("0-9%2", list(range(10)), 2),
        ("7", [7], None),
        ("1,3,5-7", [1, 3, 5, 6, 7], None),
        ("5-7,1", [1, 5, 6, 7], None),
        ("0-8:3%100", [0, 3, 6], 100),
        ("3-3", [3], None),
    ],
)
def test_an_array_has_its_indexes_in_order_and_its_limit(text, indexes, limit):
    assert list_indexes(text) == indexes
    assert parse_array(text).running_most == limit


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=4))
def test_an_array_is_the_union_of_its_ranges_or_is_refused(ranges):
    text = ",".join(f"{first}-{last}:{step}" for first, last, step in ranges)
    counts = [sum((number in range(first, last + 1, step)) for first, last, step in ranges) for number in range(31)]
    is_right = all(first <= last for first, last, _ in ranges) and max(counts) == 1
    if is_right:
        assert list_indexes(text) == [number for number, count in enumerate(counts) if count]
    else:
        with pytest.raises(InvalidArgument):
            parse_array(text)


@settings(deadline=None)
@given(st.text("0123456789-,:% x_\u0663", max_size=12))
def test_any_text_is_an_array_or_is_refused_with_a_field_and_a_remedy(text):
    try:
        array = parse_array(text)
    except InvalidArgument as error:
        (found,) = error.violations
        assert found.field == "array.indexes"
        assert found.problem
        assert found.remedy
    else:
        indexes = [element.index for element in array.elements]
        assert 0 < len(indexes) <= ARRAY_ELEMENTS_MOST
        assert indexes == sorted(set(indexes))
        assert array.running_most is None or array.running_most >= 1


@settings(deadline=None)
@given(st.data())
def test_a_sweep_runs_each_combination_once_and_substitutes_it_in_one_pass(data):
    names = data.draw(NAMES)
    # An empty list of values is no parameter.
    values = {name: data.draw(VALUES.filter(any)) for name in names}
    array = parse_sweep([f"{name}={','.join(values[name])}" for name in names])
    twin = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values.values())]
    assert [dict(element.parameters) for element in array.elements] == twin
    assert [element.index for element in array.elements] == list(range(len(twin)))
    for element, chosen in zip(array.elements, twin, strict=True):
        argv = ("run", *(f"--{name}={{{name}}}" for name in names), "{other}", '{"a": {}}', "{{lr}")
        expected = ("run", *(f"--{name}={chosen[name]}" for name in names), "{other}", '{"a": {}}')
        assert element.substitute_arguments(argv)[:-1] == expected
        assert element.substitute_arguments(argv)[-1] == "{" + chosen.get("lr", "{lr}")
        assert element.variables == {f"EELGRID_PARAM_{name.upper()}": chosen[name] for name in names}


def test_an_array_without_parameters_changes_no_command():
    assert parse_array("4").elements[0].substitute_arguments(["echo", "{lr}", "{}"]) == ("echo", "{lr}", "{}")


def test_an_array_and_a_sweep_of_the_most_elements_are_accepted():
    assert len(parse_array(f"1-{ARRAY_ELEMENTS_MOST}").elements) == ARRAY_ELEMENTS_MOST
    hundred = ",".join(map(str, range(100)))
    assert len(parse_sweep([f"a={hundred}", f"b={hundred}"], "%3").elements) == ARRAY_ELEMENTS_MOST


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"0-{ARRAY_ELEMENTS_MOST}", "makes 10001 elements"),
        ("0-999999", "makes 1000000 elements"),
        ("0-999999999", "makes 1000000000 elements"),
        ("0-5000,0-5000", "makes 10002 elements"),
        (",".join(["1"] * 20_000), "makes 20000 elements"),
        ("3-1", "is empty"),
        ("0-4:0", "is empty"),
        ("0-4,2", "has the index 2 twice"),
        ("", "no index or range"),
        ("1,", "no index or range"),
        ("0-9%0", "has the limit '0'"),
        ("0-9%", "has the limit ''"),
        ("0-9%2%3", "has the limit '2%3'"),
        ("1000000000", "no index or range"),
        ("-1", "no index or range"),
        ("\u0663", "no index or range"),
    ],
)
def test_what_is_no_array_is_refused_with_its_field_and_remedy(text, problem):
    with pytest.raises(InvalidArgument) as caught:
        parse_array(text)
    (found,) = caught.value.violations
    assert found.field == "array.indexes"
    assert problem in found.problem
    assert found.remedy


@pytest.mark.parametrize(
    ("parameters", "limit", "field", "problem"),
    [
        ([], "", "array.parameters", "is not given"),
        (["lr"], "", "array.parameters", "is 'lr'"),
        (["lr="], "", "array.parameters", "is 'lr='"),
        (["=1"], "", "array.parameters", "is '=1'"),
        (["l-r=1"], "", "array.parameters", "is 'l-r=1'"),
        (["lr=1", "lr=2"], "", "array.parameters", "has lr twice"),
        (["lr=1", "LR=2"], "", "array.parameters", "of the same variable"),
        (["lr=1,1"], "", "array.parameters", "has a value of lr twice"),
        (["lr=1"], "0-3", "array.indexes", "beside parameters"),
        (["lr=1"], "%0", "array.indexes", "has the limit '0'"),
        ([f"p{number}=1" for number in range(PARAMETERS_MOST + 1)], "", "array.parameters", "is given 65 times"),
        ([f"p{number}=1,2" for number in range(64)], "", "array.parameters", f"makes {2**64} elements"),
    ],
)
def test_what_is_no_sweep_is_refused_with_its_field_and_remedy(parameters, limit, field, problem):
    with pytest.raises(InvalidArgument) as caught:
        parse_sweep(parameters, limit)
    (found,) = caught.value.violations
    assert found.field == field
    assert problem in found.problem
    assert found.remedy


def test_ids_of_elements_are_identifiers_of_the_contract():
    (shape,) = Identifier.__metadata__
    assert make_element_id("w-7", 0) == "w-7_0"
    assert shape.pattern.fullmatch(make_element_id("w-7", 999_999_999))


@pytest.mark.parametrize(
    ("written", "values"),
    [
        ("0-3", ["0", "1", "2", "3"]),
        ("8-10,x,1-5:2", ["8", "9", "10", "x", "1", "3", "5"]),
        # No ranges: a month, one that falls, a number in thousandths, a date, a negative one.
        ("2024-01,3-1,1e-3,2024-1-1,-5", ["2024-01", "3-1", "1e-3", "2024-1-1", "-5"]),
    ],
)
def test_a_range_of_whole_numbers_is_all_of_them_and_any_other_value_is_itself(written, values):
    assert [element.parameters["seed"] for element in parse_sweep([f"seed={written}"]).elements] == values


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        (["seed=0-999999999"], "makes 1000000000 elements"),
        (["a=0-999", "b=0-10"], "makes 11000 elements"),
        (["seed=0-3,2"], "has a value of seed twice"),
        ([f"seed={','.join(['x'] * 20_000)}"], "makes 20000 elements"),
    ],
)
def test_a_sweep_is_counted_before_its_ranges_are_listed(parameters, problem):
    with pytest.raises(InvalidArgument) as caught:
        parse_sweep(parameters)
    (found,) = caught.value.violations
    assert (found.field, problem in found.problem, bool(found.remedy)) == ("array.parameters", True, True)


def test_a_request_is_a_sweep_or_indexes_or_elements_that_run_again():
    assert [one.index for one in parse_job_array(JobArrayRequest(indexes="1-2%3")).elements] == [1, 2]
    sweep = parse_job_array(JobArrayRequest(parameters=("a=1,2",), indexes="%1"))
    assert (len(sweep.elements), sweep.running_most) == (2, 1)
    again = parse_job_array(JobArrayRequest(rerun_of="w-1", indexes="%2"))
    assert (again.elements, again.running_most) == ((), 2)
    assert len(parse_job_array(JobArrayRequest(rerun_of="w-1", indexes="3,5")).elements) == 2
    assert [found.field for found in JobArrayRequest().violations()] == ["indexes"]
    assert [found.field for found in JobArrayRequest(parameters=("a=1",), rerun_of="w").violations()] == ["parameters"]

"""The newest power as arrays is what a list of the newest says, whatever comes, changes or is lost."""

import math

from hypothesis import given
from hypothesis import strategies as st

from eelgrid_controller.state.telemetry import NewestPower

NODES = 3
POWER = st.dictionaries(
    st.sampled_from("ABCD"), st.tuples(st.floats(0.0, 1e4), st.integers(1, 8)), max_size=3
)  # watts and devices by model
STEPS = st.lists(
    st.tuples(
        st.integers(0, NODES - 1), st.one_of(st.none(), st.tuples(POWER, st.integers(0, 20), st.integers(0, 20)))
    ),
    max_size=30,
)


@given(STEPS, st.integers(0, 30), st.integers(0, 30), st.integers(0, 15))
def test_it_is_the_newest_of_every_node(steps, now_s, now, fresh_s):
    newest, naive = NewestPower(), {}
    rows = [newest.add_node(f"n{number}") for number in range(NODES)]
    for node, said in steps:
        if said is None:
            naive.pop(node, None)
            newest.clear_readings(rows[node])
            continue
        naive[node] = power, received_s, at = said
        listed = [(model, power_w, gpus) for model, (power_w, gpus) in power.items()]
        newest.set_readings(rows[node], listed, received_s=float(received_s), time_ns=at * 10**9)
    seen = newest.readings(now_s=float(now_s), now_ns=now * 10**9, fresh_s=float(fresh_s))
    ages = {node: max(0.0, now_s - received_s, now - at) for node, (_, received_s, at) in naive.items()}
    assert {row: age_s for row, age_s in enumerate(seen.age_s.tolist()) if not math.isnan(age_s)} == ages
    cells = zip(seen.row.tolist(), seen.model.tolist(), seen.power_w.tolist(), seen.gpus.tolist(), strict=True)
    found = [((row, seen.models[model]), (power_w, gpus)) for row, model, power_w, gpus in cells]
    assert len(dict(found)) == len(found), "each once"
    assert dict(found) == {
        (node, model): told
        for node, (power, _, _) in naive.items()
        if ages[node] <= fresh_s
        for model, told in power.items()
    }
    assert newest._cells <= NODES * 3, "a node has as many cells as it ever had models at once, not more"


def test_rows_and_cells_grow():
    newest = NewestPower()
    for number in range(200):
        newest.set_readings(
            newest.add_node(f"n{number}"), [("A", 1.0, 1), (f"M{number}", 2.0, 1)], received_s=0.0, time_ns=0
        )
    seen = newest.readings(now_s=0.0, now_ns=0, fresh_s=1.0)
    assert (len(seen.age_s), len(seen.row), seen.power_w.sum(), len(seen.models)) == (200, 400, 600.0, 201)

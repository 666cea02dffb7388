"""Questions and answers beside the control cycle: what is asked is answered later, learned when due, bounded, and ended."""

import logging
from dataclasses import replace

import pytest
from tests.fakes.learners import LearnsHere, family, served, trained
from tests.waiting import wait_until

from eelgrid_controller.objectives import forecasts as module
from eelgrid_controller.objectives.forecasts import (
    NOT_LEARNED_REASON,
    RETRAIN_RETRY_S,
    ForecastService,
    JobQuestion,
    LearningFailed,
    LearningProcess,
    ScaleQuestion,
    ServiceQuestion,
    build_store,
)
from eelgrid_controller.profiles.learning import learn_family
from eelgrid_controller.profiles.points import Configuration
from eelgrid_controller.profiles.prediction import ProfilePredictor
from eelgrid_controller.state.measurements import MeasuredPoints, make_profile_point
from eelgrid_protos.catalogue.loader import load_catalogue
from eelgrid_protos.messages import MeasuredPoint

LOG = logging.getLogger("test.forecasts")
ASKED = ServiceQuestion("llm", "G2", 1, None)


class Rig:
    """Forecasts with a clock that a test sets."""

    def __init__(self, learner=None):
        self.now_s = 100.0
        self.learner = learner or LearnsHere()
        self.forecasts = ForecastService(
            load_catalogue(), learner=self.learner, monotonic_s=lambda: self.now_s, log=LOG
        )

    def tell(self, points):
        self.forecasts.update_points(dict(MeasuredPoints(points)))

    async def turn(self, *questions):
        found = [self.forecasts.request_forecast(question) for question in questions]
        self.forecasts.end_cycle()
        await wait_until(lambda: not self.forecasts._mail.is_running, within_s=60.0)
        return found


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.forecasts.close()


async def test_an_answer_comes_in_a_later_turn_and_nothing_is_learned_unasked(rig):
    rig.tell(family())
    await rig.turn()
    assert rig.learner.asked == []
    assert await rig.turn(ASKED) == [None]
    [found] = await rig.turn(ASKED)
    assert [one.point.configuration.batch for one in found.points] == [1, 2, 4]
    assert found.learned_from == 21
    assert rig.learner.asked == ["served"]
    await rig.turn(ASKED)
    assert rig.learner.asked == ["served"]  # nothing changed


async def test_a_family_is_learned_again_when_it_has_grown_or_changed_by_a_quarter(rig):
    rig.tell(family())
    await rig.turn(ASKED)
    first = (await rig.turn(ASKED))[0]
    one_more = [replace(family()[0], batch=8)]
    rig.tell([*family(), *one_more])
    await rig.turn(ASKED)
    assert rig.learner.asked == ["served"]
    assert rig.forecasts.request_forecast(ASKED) is first  # moved by less than MOVED: the plan stays
    moved = [replace(point, throughput_hz=2.0 * point.throughput_hz) for point in family()[:9]]
    rig.tell([*family(), *moved])  # the last of a configuration counts
    await rig.turn(ASKED)
    assert rig.learner.asked == ["served"] * 2
    assert rig.forecasts.request_forecast(ASKED) is not first


async def test_a_job_gets_ratios_against_its_largest_limit(rig):
    rig.tell(
        [*(point for name in "abc" for model in ("G2", "G3") for point in trained(name, model)), *trained("llm", "G3")]
    )
    question = JobQuestion("llm", "G2", 1, (400.0, 300.0, 200.0, 150.0))
    await rig.turn(question)
    [found] = await rig.turn(question)
    assert found.bend.time[0] == (0.0, 0.0)
    assert found.bend.time[2].mean == pytest.approx(0.182, abs=0.06)  # 1 / (1 - 0.5 / 3)
    assert found.bend.energy[2].mean == pytest.approx(0.182 - 0.693, abs=0.12)
    assert all(one.half > 0.0 for one in found.bend.time[1:])
    assert rig.learner.asked == ["trained"]


def scaling(name, counts, *, base_hz=2.0):
    """A job whose GPUs help each other a little less each, at watts that follow."""
    return [
        MeasuredPoint(
            profile=name, gpu_model="G2", gpus=gpus, throughput_hz=base_hz * gpus**0.9, power_w=250.0 * gpus**0.97
        )
        for gpus in counts
    ]


async def test_numbers_of_gpus_between_two_that_were_measured(rig):
    rig.tell(
        [
            *(point for index, name in enumerate("abcd") for point in scaling(name, (1, 2, 4, 8), base_hz=1.0 + index)),
            *scaling("llm", (1, 2, 8)),
        ]
    )
    question = ScaleQuestion("llm", "G2", (8, 4))
    await rig.turn(question)
    [found] = await rig.turn(question)
    [four] = found.counts
    assert four.gpus == 4
    for ends, truth in ((four.throughput_hz, 2.0 * 4**0.9), (four.power_w, 250.0 * 4**0.97)):
        assert ends[0] < truth < ends[1]
        assert ends[1] < 2.0 * ends[0]
    assert found.learned_from == 19
    [none] = await rig.turn(ScaleQuestion("llm", "G2", (4, 2)))
    assert none is None
    [none] = await rig.turn(ScaleQuestion("llm", "G2", (4, 2)))
    assert "4 GPUs only in unusual configurations" in none.why_none


async def test_until_a_family_is_learned_it_says_so():
    class Fails(LearnsHere):
        def __call__(self, profiles, family):
            raise LearningFailed(family, "give it more")

    rig = Rig(Fails())
    rig.tell(scaling("llm", (1, 8)))
    question = ScaleQuestion("llm", "G2", (8, 4))
    await rig.turn(question)
    [found] = await rig.turn(question)
    assert found.why_none == NOT_LEARNED_REASON
    rig.forecasts.close()


@pytest.mark.parametrize(
    ("points", "question", "words"),
    [
        ([], ASKED, "no points"),
        (served("llm", "G3"), ASKED, "no model of its kind"),
        ([point for name in ("a", "b", "llm") for point in served(name, "G3")], ASKED, "measured on G2"),
        (family(), ASKED._replace(gpus=8), "8 GPUs a replica nowhere else"),
        (family(), ASKED._replace(limit_w=100.0), "power limit was never varied"),
        (trained("a", "G2") + trained("b", "G2"), JobQuestion("none", "G2", 1, (400.0, 200.0)), "no points"),
    ],
)
async def test_why_there_is_no_prediction(rig, points, question, words):
    rig.tell(points)
    await rig.turn(question)
    [found] = await rig.turn(question)
    assert words in found.why_none
    assert found.points == ()
    assert found.bend is None


async def test_what_cannot_be_learned_is_tried_again_later_and_more_and_more_rarely(caplog):
    class Fails(LearnsHere):
        def __call__(self, profiles, name):
            self.asked.append(name)
            raise LearningFailed("no memory", "give it some")

    rig = Rig(Fails())
    rig.tell(family())
    tries = []
    for _ in range(8):
        await rig.turn(ASKED)
        tries.append(len(rig.learner.asked))
        rig.now_s += 0.5 * RETRAIN_RETRY_S
    assert tries == [1, 1, 2, 2, 2, 2, 3, 3]
    assert "learned=no" in caplog.text
    rig.forecasts.close()
    await rig.turn(ASKED)
    assert len(rig.learner.asked) == 3
    assert rig.learner.closed


async def test_questions_are_bounded_and_those_nobody_asks_are_forgotten(rig, monkeypatch):
    monkeypatch.setattr(module, "QUESTIONS_MOST", 3)
    rig.tell(family())
    many = [ASKED._replace(gpus=gpus) for gpus in range(1, 5)]
    assert "more than" in (await rig.turn(*many))[3].why_none
    for _ in range(module._KEPT_CYCLES + 2):
        rig.forecasts.request_forecast(many[3])
        rig.forecasts.end_cycle()
    assert rig.forecasts._asked.keys() == {many[3]}


async def test_a_child_learns_what_is_learned_here_and_can_be_ended():
    profiles = build_store({name: tuple(map(make_profile_point, served(name, "G3"))) for name in "abc"})
    learner = LearningProcess()
    asked = [Configuration("G3", batch=batch) for batch in (1, 3, 8)]
    theirs, ours = (
        ProfilePredictor(profiles, {"served": found}, load_catalogue()).predict("a", asked)
        for found in (learner(profiles, "served"), learn_family(profiles, "served", load_catalogue()))
    )
    for one, other in zip(theirs, ours, strict=True):  # a core each way may round otherwise
        assert one.throughput_hz == pytest.approx(other.throughput_hz, rel=1e-3)
    with pytest.raises(LearningFailed, match="too few measurements"):
        learner(profiles, "nobody")
    learner.close()
    with pytest.raises(LearningFailed, match="stops"):
        learner(profiles, "served")

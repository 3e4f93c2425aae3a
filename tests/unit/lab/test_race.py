import dataclasses
import json

import pytest
from lab.race import figures, plans, report, runner
from lab.race.jobs import SMALL, Job
from lab.race.rivals import METHODS
from lab.race.runner import Link, Results, bits_a_second

from cadenza import emulation

SCALE = dataclasses.replace(plans.QUICK, links=("100mbit",))


def entry_of(job, link, repeat=0, **figures):
    return {"job": json.loads(job.to_json()), "link": link, "repeat": repeat, **figures}


ALONE = 0.2  # seconds of a step of compute alone


def times(**seconds_a_step):
    """Times in which every contender takes so many seconds a step, three times, and sends a megabyte."""
    runs = []
    for label, seconds in seconds_a_step.items():
        job = plans.timed(plans.ENTRIES[label], SCALE)
        for repeat, (noise, slowness) in enumerate([(1.0, 1.0), (0.9, 2.0), (7.0, 1.0)]):
            floor = ALONE * slowness  # of the machine, in this minute
            elapsed = (floor + (seconds - ALONE) * noise) * job.steps
            told = {"elapsed_s": elapsed, "floor_s": floor, "bytes_sent": 1e6 * job.steps}
            runs.append(entry_of(job, "100mbit", repeat, **told))
    return figures.Times(runs, SCALE)


class TestPlans:
    def test_every_contender_is_a_method_of_the_rivals(self):
        assert {entry.method for entry in plans.SYNC_ENTRIES.values()} <= METHODS.keys()
        assert {job.method for job in plans.LOSSES.values()} <= METHODS.keys()

    def test_whole_periods_are_timed_and_at_least_twenty_steps(self):
        for job, _ in plans.timing(plans.FULL):
            assert job.steps >= 20
            assert job.steps % job.period == 0

    def test_late_rounds_have_landed_once_before_the_clock_starts(self):
        late = [entry for entry in plans.ENTRIES.values() if entry.late is not None]
        assert late
        for entry in late:
            for period in entry.periods:
                assert plans.timed(entry, plans.FULL, period).warm == period + entry.late

    def test_compute_alone_is_measured_between_whole_periods(self):
        for job, _ in plans.timing(plans.FULL):
            assert job.floor_every % job.period == 0
            assert job.steps % job.floor_every == 0

    def test_all_races_can_be_listed_at_both_scales(self):
        for race in plans.RACES.values():
            for scale in (plans.FULL, plans.QUICK):
                assert list(race(scale))

    def test_a_job_survives_the_way_to_a_worker(self):
        for job, _ in plans.training(plans.FULL):
            assert Job.from_json(job.to_json()) == job


class TestLinks:
    def test_a_word_says_hosts_rates_and_sites(self):
        network = Link("sites 1gbit 20mbit x6").network()
        assert (network.sites, network.rate, network.between) == ([3, 3], "1gbit", "20mbit")
        assert Link("unlimited").network().rate is None

    def test_the_slowest_part_counts(self):
        assert bits_a_second("sites 1gbit 20mbit") == 20e6
        assert bits_a_second("unlimited") is None


class TestFigures:
    def test_a_loss_between_two_points_is_reached_between_their_steps(self):
        assert figures.crossing([(8, 4.0), (16, 3.0), (24, 2.0)], 2.25) == 22.0
        assert figures.crossing([(8, 4.0), (16, 3.0)], 2.0) is None

    def test_repeats_count_by_the_median_of_what_they_take_above_their_own_compute_alone(self):
        known = times(DDP=0.5)
        assert known.above("DDP", "100mbit") == pytest.approx(0.3)
        assert known.step("DDP", "100mbit") == pytest.approx(0.5)

    def test_a_period_that_was_not_timed_follows_from_the_one_that_was(self):
        known = times(**{"torch PeriodicModelAverager": 0.3})
        assert known.step("torch PeriodicModelAverager", "100mbit", 32) == pytest.approx(0.25)

    def test_late_rounds_are_never_computed_from_another_period(self):
        known = times(**{"Cadenza streaming_diloco": 0.21})
        assert known.step("Cadenza streaming_diloco", "100mbit", 64) is None

    def test_steps_with_gradients_take_what_ddp_takes(self):
        known = times(**{"DDP": 2.2, "torch PostLocalSGDOptimizer": 0.25})
        job = Job("Cadenza diloco", 16, {"gradient_steps": 10})
        way = figures.finish("torch PostLocalSGDOptimizer", "100mbit", job, 110, known)
        assert way.seconds == pytest.approx(10 * 2.2 + 100 * 0.25)
        assert way.overhead_s == pytest.approx(way.seconds - 110 * 0.2)

    def test_a_contender_is_named_once_with_its_quickest_way(self):
        def way(label, seconds):
            return figures.Finish(label, "100mbit", Job("DDP"), 10, seconds, alone_s=2.0, megabytes=1.0)

        best = figures.quickest([way("DDP", 9.0), way("Cadenza local_sgd", 3.0), way("DDP", 8.0)])
        assert {one.label: one.seconds for one in best} == {"DDP": 8.0, "Cadenza local_sgd": 3.0}

    def test_the_bar_is_told_of_the_quickest_way_and_of_the_leanest_that_no_rival_beats(self):
        def way(label, seconds, overhead, period):
            return figures.Finish(label, "100mbit", Job("DDP", period), 10, seconds, seconds - overhead, megabytes=1.0)

        ours = [way("Cadenza local_sgd", *told) for told in ((10, 4, 4), (11, 1, 16), (13, 0.5, 64))]
        told = report.bar([*ours, way("DDP", 12, 5, 1)])
        assert "at H = 4: 10.0 s, 4.0 s of it above compute alone, 0.80 of the rival's" in told
        assert "at H = 16: 11.0 s, 1.0 s of it above compute alone, 0.20 of the rival's" in told
        assert "H = 64" not in told

    def test_the_target_is_a_loss_that_all_reach(self, tmp_path):
        results = Results(tmp_path / "race_training.json")
        for label, end in {"DDP": 2.1, "Cadenza local_sgd": 2.234}.items():
            job, link = next(plans.training(SCALE, [label]))
            results.runs.append(entry_of(job, link, curve=[(8, 3.0), (16, end)]))
        assert figures.target_of(results, SCALE) == pytest.approx(2.24)


class TestResults:
    def test_what_has_been_run_is_not_run_again(self, tmp_path):
        path, job, calls = tmp_path / "race.json", Job("DDP"), []
        for _ in range(2):
            Results(path).get(job, "1gbit", run=lambda *given: calls.append(given) or {"elapsed_s": 1.0})
        assert len(calls) == 1

    def test_a_rival_that_fails_is_written_down_and_does_not_end_the_race(self, tmp_path):
        def fails(job, link):
            raise RuntimeError("no such host")

        entry = Results(tmp_path / "race.json").get(Job("DDP"), "1gbit", run=fails)
        assert "no such host" in entry["failed"]

    def test_a_table_replaces_the_one_before_between_its_markers_only(self):
        page = "a\n<!-- race:sites -->\nold\n<!-- /race:sites -->\nb"
        once = report.insert(page, "sites", "| new |")
        assert report.insert(once, "sites", "| new |") == once
        assert once.startswith("a\n")
        assert "old" not in once

    def test_every_section_of_the_report_has_its_place_in_the_docs(self):
        page = report.PAGE.read_text()
        assert all(f"<!-- race:{name} -->" in page for name in report.SECTIONS)


@pytest.mark.timeout(400)
@pytest.mark.skipif(emulation.available() is not None, reason=str(emulation.available()))
def test_a_method_runs_on_emulated_hosts_and_is_judged_by_its_average():
    job = Job("Cadenza local_sgd", 2, steps=4, warm=0, floor_every=2, evaluate_every=2, windows=8, size=SMALL)
    figures = runner.run(job, "100mbit x2")
    size = figures["parameters"] * 4
    assert [step for step, _ in figures["curve"]] == [2, 4]
    assert figures["bytes_sent"] > 2 * size  # two rounds, and what evaluations send
    assert len(figures["step_s"]) == 4
    assert figures["floor_s"] > 0

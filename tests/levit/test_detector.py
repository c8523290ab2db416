"""The charts: scores by definition, limits against simulation, and streams whose answer is known."""

import random
from statistics import NormalDist

import numpy as np
import pytest
import torch

from bench import run_length
from levit import detector
from levit.detector import RUN_LENGTHS, WARM_UP, WINDOW, Chart, limit_for, normal_score, score_table

LIMIT = limit_for(100_000)


def alarms(values, limit=LIMIT, **start):
    """Positions of the alarms; after each the new values are usual, as where no expert may be added."""
    chart, found = Chart(limit, **start), []
    for i, value in enumerate(values):
        if chart.observe(float(value)):
            found.append(i)
            chart.adapt()
    return found


def noise(count, seed=0):
    return np.random.default_rng(seed).standard_exponential(count)


class TestScore:
    def test_is_the_normal_quantile_of_the_relative_rank(self):
        window = [0.0, 2.0, 4.0, 6.0]
        for value, rank in [(-1, 0), (1, 1), (3, 2), (5, 3), (7, 4)]:
            assert normal_score(value, window) == NormalDist().inv_cdf((rank + 0.5) / 5)

    def test_table(self):
        window = [0.0, 2.0, 4.0]
        assert score_table(3) == [normal_score(value, window) for value in (-1.0, 1.0, 3.0, 5.0)]

    def test_ties_share_their_mean_rank(self):
        assert normal_score(1.0, [1.0] * 8) == 0.0
        assert normal_score(1.0, [0.0, 1.0, 1.0, 2.0]) == 0.0

    @pytest.mark.parametrize("change", [np.exp, np.cbrt, lambda x: 7 * x - 3])
    def test_knows_only_the_order(self, change):
        values = noise(WINDOW + 1)
        scores = [normal_score(v[-1], list(v[:-1])) for v in (values, change(values))]
        assert scores[0] == scores[1]


class TestLimit:
    def test_goes_through_the_simulated_values_and_grows(self):
        for limit, length in RUN_LENGTHS:
            assert limit_for(length) == pytest.approx(limit)
        limits = [limit_for(10.0**power) for power in range(1, 9)]
        assert limits == sorted(limits) and limits[0] > 0

    def test_a_chart_keeps_the_promised_run_length(self):
        # About 150 alarms: the standard error is 8 %.
        count = 50_000
        assert run_length.alarms(limit_for(345), count) == pytest.approx(count / 345, rel=0.25)

    def test_the_simulation_is_of_the_chart(self):
        limit, seed, count = 1.5, 3, 3000
        draw = random.Random(seed).random
        assert run_length.alarms(limit, count, seed) == len(alarms([draw() for _ in range(count)], limit))


class TestChart:
    def test_nothing_is_tested_before_the_warm_up(self):
        chart = Chart(LIMIT)
        for value in range(WARM_UP):
            assert not chart.observe(float(value)) and chart.statistic == 0

    @pytest.mark.parametrize("seed", range(3))
    def test_quiet_while_nothing_changes(self, seed):
        assert alarms(noise(2000, seed)) == []

    @pytest.mark.parametrize("seed", range(3))
    def test_an_abrupt_rise_is_found_within_six_batches(self, seed):
        values = noise(300, seed) + 10 * (np.arange(300) >= 200)
        found = alarms(values)
        assert found and 200 <= found[0] < 206

    def test_the_onset_is_known(self):
        chart = Chart(LIMIT)
        values = np.concatenate([noise(100), [50.0, 51.0, 52.0, 53.0, 54.0, 55.0]])
        seen = 0
        while not chart.observe(float(values[seen])):
            seen += 1
        assert chart.suspect == list(values[100 : seen + 1])
        assert max(chart.window) < 50

    def test_a_fall_is_progress(self):
        assert alarms(noise(300) - 10 * (np.arange(300) >= 200)) == []

    def test_learning_is_no_alarm(self):
        assert alarms(10 * np.exp(-np.arange(300) / 40) + 0.1 * noise(300)) == []

    def test_a_single_odd_batch_is_no_alarm(self):
        values = noise(300)
        values[200] = 1e6
        assert alarms(values) == []

    def test_slow_drift_is_followed(self):
        # A rise of one standard deviation over two windows stays below the allowance.
        assert alarms(noise(600) + np.arange(600) / (2 * WINDOW)) == []

    def test_constant_values_are_usual(self):
        assert alarms(np.ones(500)) == []

    def test_after_acceptance_the_new_level_is_usual(self):
        values = noise(1000) + 10 * (np.arange(1000) >= 200)
        assert len(alarms(values)) == 1

    def test_a_fixed_window_stays(self):
        window = noise(WINDOW).tolist()
        chart = Chart(LIMIT, window, fixed=True)
        for value in noise(50, 1):
            chart.observe(float(value))
        assert chart.window == window

    def test_goes_on_from_a_saved_state(self):
        values = noise(200) + 3 * (np.arange(200) >= 150)
        chart = Chart(LIMIT)
        for value in values[:153]:
            chart.observe(float(value))
        other = Chart.from_state(LIMIT, torch_round_trip(chart.state_dict()))
        for value in values[153:]:
            assert chart.observe(float(value)) == other.observe(float(value))
            assert chart.state_dict() == other.state_dict()


def torch_round_trip(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_constants_are_those_of_the_documentation():
    assert (detector.WINDOW, detector.WARM_UP, detector.ALLOWANCE) == (60, 30, 1.0)

import copy
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier, MLPRegressor
from torch import nn

from terrafirma.capture.record import record
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput, NotFitted
from terrafirma.guard.explain import Explanation, RegionShare
from terrafirma.guard.guard import Guard
from terrafirma.guard.verdict import evaluate
from terrafirma.recorded import ClippedError, Recorded
from terrafirma.scores.logits import entropy
from terrafirma.scores.subfunction import SubfunctionBound
from tests import naive

pytestmark = [pytest.mark.jit, pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")]


@pytest.fixture(scope="module")
def digits():
    """Training, validation and test images of digits, with some labels wrong in training."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(X))
    X, y = X[order], y[order]
    y[:40] = (y[:40] + 1) % 10
    return (X[:700], y[:700]), (X[700:1400], y[700:1400]), (X[1400:], y[1400:])


@pytest.fixture(scope="module")
def mlp(digits):
    net = MLPClassifier((64, 48), solver="sgd", learning_rate_init=0.1, max_iter=40, batch_size=50, random_state=0)
    return net.fit(*digits[0])


@pytest.fixture(scope="module")
def net(mlp):
    """The same network in torch."""
    layers = []
    for W, b in zip(mlp.coefs_, mlp.intercepts_, strict=True):
        linear = nn.Linear(*W.shape)
        linear.weight.data, linear.bias.data = torch.tensor(W.T).float(), torch.tensor(b).float()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).train()


@pytest.fixture
def guard(mlp, digits):
    train, validation, _ = digits
    return Guard(mlp).fit(train, validation, risk=0.05, confidence=0.9, verbose=False)


def same_tables(a, b):
    arrays = ("panels", "counts", "error_sum", "sample_region")
    return a.n_units == b.n_units and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays)


def same_verdicts(a, b):
    return all(np.array_equal(getattr(a, part.name), getattr(b, part.name)) for part in fields(a))


class TestFitAndPredict:
    def test_a_verdict_is_the_sum_of_its_parts(self, guard, mlp, digits):
        (X, _), _, (X_test, y_test) = digits
        verdict = guard.predict(X_test)
        assert np.array_equal(verdict.prediction, mlp.predict(X_test))
        state = guard.state
        by_hand = SubfunctionBound(state.score.rho, state.score.delta)
        by_hand.fit(record(mlp, digits[0]).patterns, mlp.predict(X) != digits[0][1])
        assert np.array_equal(verdict.unreliability, by_hand.unreliability(record(mlp, X_test).patterns))
        assert np.array_equal(verdict.accepted, verdict.unreliability <= guard.policy.threshold)
        assert np.array_equal(verdict.error_probability, state.error_probability.probability(verdict.unreliability))
        assert 0.2 < verdict.accepted.mean() < 1
        wrong = verdict.prediction != y_test
        assert wrong[verdict.accepted].mean() < wrong[~verdict.accepted].mean()
        assert repr(verdict) == (
            f"<Verdict on {len(X_test)} predictions: {verdict.accepted.sum()} accepted, {(~verdict.accepted).sum()} refused>"
        )

    def test_the_policy_never_sees_what_selection_saw(self, guard, mlp, digits):
        _, (X_val, y_val), _ = digits
        seen = record(mlp, (X_val, y_val))
        kept = guard.state.calibration
        assert len(kept) == guard.state.selected.n_samples == len(X_val) // 2
        wrong = seen.errors.sum() - kept.errors.sum()
        assert guard.state.selected.mean_error == pytest.approx(wrong / (len(X_val) // 2))
        words = [row.tobytes() for row in seen.patterns.words]
        assert {row.tobytes() for row in kept.patterns.words} < set(words)

    def test_a_set_of_its_own_calibrates(self, mlp, digits):
        train, (X_val, y_val), _ = digits
        choosing, calibrating = (X_val[:300], y_val[:300]), (X_val[300:], y_val[300:])
        guard = Guard(mlp).fit(train, choosing, calibrating, risk=0.05, verbose=False)
        assert guard.state.selected.n_samples == 300
        assert np.array_equal(guard.state.calibration.errors, record(mlp, calibrating).errors)

    def test_fixed_hyperparameters_leave_all_of_validation_to_the_policy(self, mlp, digits):
        train, validation, _ = digits
        guard = Guard(mlp, SubfunctionBound(rho=3.0, delta=0.1)).fit(train, validation, verbose=False)
        assert (guard.state.score.rho, guard.state.score.delta) == (3.0, 0.1)
        assert guard.state.selected is None
        assert len(guard.state.calibration) == len(validation[0])
        assert "rho 3 bits, delta 0.1\n" in guard.summary()

    def test_fit_prints_what_it_did(self, mlp, digits, capsys):
        train, validation, _ = digits
        guard = Guard(mlp).fit(train, validation, risk=0.05, confidence=0.9)
        text = capsys.readouterr().out
        wrong = (mlp.predict(train[0]) != train[1]).mean()
        assert text.startswith(guard.summary())
        assert "Guard of MLPClassifier: hidden_2 (48 units)\n" in text
        assert f"trained on   700 samples in {len(guard.state.table)} regions, mean error {wrong:.4g}" in text
        assert "best of the grid on 350 samples (half of validation), AUCEA 0.9" in text
        assert "calibrated on 350 samples (the other half of validation), mean error " in text
        assert "warning" not in text
        assert f"policy       {guard.policy}\n" in text
        assert guard.policy.risk_bound <= 0.05
        assert re.search(r"took +\d+\.\d s, of which \d+\.\d s recording\n$", text)

    def test_nothing_to_select_by_is_said(self, mlp, digits):
        train, (X, _), _ = digits
        guard = Guard(mlp).fit(train, (X, mlp.predict(X)), verbose=False)
        assert "the first of the grid, for none of the 350 samples to select on is wrong" in guard.summary()

    def test_tensors_in_tensors_out(self, net, digits):
        train, validation, (X, _) = digits
        guard = Guard(net, SubfunctionBound(rho=3.0)).fit(train, validation, risk=0.05, verbose=False)
        arrays, tensors = guard.predict(X), guard.predict(torch.tensor(X))
        for part in fields(arrays):
            array, tensor = getattr(arrays, part.name), getattr(tensors, part.name)
            assert isinstance(array, np.ndarray)
            assert isinstance(tensor, torch.Tensor)
            assert np.array_equal(array, tensor.numpy())
        assert tensors.prediction.dtype == torch.int64
        assert tensors.unreliability.dtype == torch.float64
        assert tensors.accepted.dtype == torch.bool
        with torch.no_grad():
            assert torch.allclose(tensors.output, net.eval()(torch.tensor(X)), atol=1e-5)

    def test_threads_may_ask_one_guard_at_once(self, net, digits):
        train, validation, (X, _) = digits
        guard = Guard(net, SubfunctionBound(rho=3.0)).fit(train, validation, risk=0.05, verbose=False)
        parts = [X[i : i + 20] for i in range(0, 380, 20)]
        alone = [guard.predict(part) for part in parts]
        net.train()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(guard.predict, parts * 4))
        assert all(same_verdicts(a, b) for a, b in zip(alone * 4, together, strict=True))
        assert net.training

    def test_labels_are_not_looked_at(self, guard, digits):
        X, y = digits[2]
        plain = guard.predict(X)
        for data in ((X, y), (X, y[::-1])):
            assert same_verdicts(guard.predict(data), plain)

    def test_layers_of_the_fit_are_recorded_whatever_is_asked_for_later(self, mlp, digits):
        train, validation, (X, _) = digits
        guard = Guard(mlp, SubfunctionBound(2.0), layers="hidden_1").fit(train, validation, verbose=False)
        before = guard.predict(X).unreliability
        guard.layers = ["hidden_2"]
        assert np.array_equal(guard.predict(X).unreliability, before)

    def test_a_score_that_ranks_at_random_is_said(self, mlp, digits):
        (X, y), (X_val, y_val), _ = digits
        constant = Recorded(patterns=np.ones((700, 4), bool), errors=(mlp.predict(X) != y).astype(float))
        validation = Recorded(patterns=np.ones((700, 4), bool), errors=(mlp.predict(X_val) != y_val).astype(float))
        text = Guard(None).fit(constant, validation, verbose=False).summary()
        assert "warning      this ranks errors no better than a random order does: record other layers" in text

    def test_errors_of_recordings_are_found_by_the_guards_function(self, mlp, digits):
        train, validation, _ = (record(mlp, data) for data in digits)
        bare = [
            replace(r, errors=None, outputs=r.outputs[:, :1], labels=r.labels.astype(float))
            for r in (train, validation)
        ]
        guard = Guard(None, SubfunctionBound(2.0), error=ClippedError(50.0)).fit(*bare, risk=0.9, verbose=False)
        expected = np.minimum(np.abs(train.outputs[:, 0] - train.labels) / 50, 1)
        assert np.allclose(guard.state.samples.errors, expected)

    def test_batches_and_loaders_give_the_same_verdict(self, guard, digits):
        X, y = digits[2]
        whole = guard.predict(X)
        guard.batch_size = 7
        by_loader = guard.predict([(X[:100], y[:100]), (X[100:], y[100:])])
        for other in (guard.predict(X), by_loader):
            assert np.array_equal(whole.unreliability, other.unreliability)
            assert np.array_equal(whole.accepted, other.accepted)

    def test_classes_keep_their_names(self, digits):
        (X, y), (X_val, y_val), (X_test, _) = digits
        names = np.array([f"digit {i}" for i in range(10)])
        mlp = MLPClassifier((48,), max_iter=30, random_state=0).fit(X, names[y])
        guard = Guard(mlp).fit((X, names[y]), (X_val, names[y_val]), risk=0.1, verbose=False)
        assert np.array_equal(guard.predict(X_test).prediction, mlp.predict(X_test))
        assert all(label.startswith("digit") for label in guard.explain(X_test[:1])[0].regions[0].labels)
        verdict = guard.predict(torch.tensor(X_test))  # names have no tensor
        assert isinstance(verdict.prediction, np.ndarray)
        assert isinstance(verdict.accepted, torch.Tensor)

    def test_a_regression_is_guarded_without_probabilities(self, rng):
        X = rng.uniform(-2, 2, size=(4000, 2))
        y = np.sin(3 * X[:, 0]) + X[:, 1]
        dense = np.abs(X[:, 0]) < 0.8  # where training samples lie
        net = MLPRegressor(hidden_layer_sizes=(32, 32, 32), max_iter=500, random_state=0).fit(
            X[dense][:800], y[dense][:800]
        )
        guard = Guard(net, layers="hidden_*", error=ClippedError(scale=1.0))
        guard.fit((X[dense][:800], y[dense][:800]), (X[:2000], y[:2000]), risk=0.1, verbose=False)
        verdict = guard.predict(X[2000:])
        assert np.array_equal(verdict.prediction, net.predict(X[2000:]))
        error = np.minimum(np.abs(verdict.output.ravel() - y[2000:]), 1.0)
        assert error[verdict.accepted].mean() < 0.1 < error.mean()
        assert verdict.accepted[dense[2000:]].mean() > 0.6
        assert verdict.accepted[~dense[2000:]].mean() < 0.1
        assert guard.evaluate((X[2000:], y[2000:])).auroc is None

    def test_recorded_arrays_of_any_framework_are_enough(self, guard, mlp, digits):
        train, validation, test = (record(mlp, data) for data in digits)
        bare = Guard(None).fit(
            *(Recorded(patterns=r.patterns, errors=r.errors) for r in (train, validation)), risk=0.05, confidence=0.9
        )
        assert np.array_equal(bare.unreliability(test), guard.unreliability(digits[2][0]))
        labelled = Guard(None).fit(train, validation, risk=0.05, confidence=0.9, verbose=False)
        assert np.array_equal(labelled.predict(test).accepted, guard.predict(digits[2][0]).accepted)

    def test_any_score_can_stand_in(self, mlp, digits):
        class Entropy:
            """Of the outputs."""

            def fit(self, train, validation):
                self.sizes = len(train), len(validation)

            def unreliability(self, recorded):
                return entropy(recorded.outputs)

        train, validation, (X, _) = digits
        guard = Guard(mlp, Entropy()).fit(train, validation, risk=0.05, verbose=False)
        assert guard.state.score.sizes == (700, 350)
        verdict = guard.predict(X)
        assert np.array_equal(verdict.unreliability, entropy(verdict.output))
        assert "score        Entropy: on 350 samples (half of validation), AUCEA " in guard.summary()
        message = "This needs the subfunction bound. Got a guard with Entropy; leave score out of Guard(...)."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            guard.explain(X)


class TestEvaluate:
    def test_figures_are_those_of_the_verdict(self, guard, digits):
        X, y = digits[2]
        verdict, found = guard.predict(X), guard.evaluate((X, y))
        wrong = verdict.prediction != y
        assert found.error == wrong.mean()
        assert found.risk == wrong[verdict.accepted].mean()
        assert found.error_refused == wrong[~verdict.accepted].mean()
        assert found.coverage == verdict.accepted.mean()
        assert (found.promised_risk, found.promised_confidence) == (0.05, 0.9)
        low, high = found.risk_interval
        n, k = verdict.accepted.sum(), wrong[verdict.accepted].sum()
        assert binom.cdf(k, n, high) == pytest.approx(0.025)
        assert binom.sf(k - 1, n, low) == pytest.approx(0.025)
        text = str(found)
        assert f"{len(X)} predictions, mean error {wrong.mean():.4g}; AUCEA {found.aucea:.4f} (a random order: " in text
        assert f"with mean error {found.risk:.4g} (95 % interval {low:.2g} to {high:.2g})" in text
        assert text.endswith("; promised: at most 0.05 at 90% confidence.")

    def test_shares_are_cut_at_the_row_they_name(self, rng):
        unreliability, errors = rng.permutation(50).astype(float), rng.random(50)
        found = evaluate(unreliability, errors, unreliability < 20, 0.5, 0.9)
        ordered = errors[np.argsort(unreliability)]
        means = np.cumsum(ordered) / np.arange(1, 51)
        for k in (1, 7, 25, 50):
            assert found.risk_at(k / 50) == pytest.approx(means[k - 1])
        within = np.flatnonzero(means <= 0.5)
        assert found.coverage_at(0.5) == (within[-1] + 1) / 50
        assert found.coverage_at(0.0) == 0
        assert found.risk_interval is None
        for share in (-0.1, 2):
            with pytest.raises(InvalidInput, match=re.escape(f"coverage must lie in [0, 1]. Got {share}.")):
                found.risk_at(share)

    def test_nothing_accepted_is_no_error(self, mlp, digits):
        train, validation, test = digits
        found = Guard(mlp).fit(train, validation, risk=0.001, verbose=False).evaluate(test)
        assert found.coverage == 0
        assert np.isnan(found.risk)
        assert str(found).endswith("\nNone accepted (promised: at most 0.001 at 95% confidence).")


class TestExplain:
    def test_regions_are_those_of_brute_force(self, guard, mlp, digits):
        (X, y), _, (X_test, _) = digits
        bits, query = record(mlp, X).patterns.to_bool(), record(mlp, X_test[:4]).patterns.to_bool()
        wrong = mlp.predict(X) != y
        verdict = guard.predict(X_test[:4])
        for row, found in enumerate(guard.explain(X_test[:4], n=3)):
            expected = naive.neighbourhood(bits, query[row], guard.state.score.rho)
            assert found.nearest == min(region.distance for region in expected)
            assert [region.share for region in found.regions] == pytest.approx(
                [region.share for region in expected[:3]]
            )
            for got, region in zip(found.regions, expected, strict=False):
                members = np.flatnonzero((bits == region.pattern).all(axis=1))
                if (
                    sum(got.share == pytest.approx(other.share) for other in expected[:5]) == 1
                ):  # else it is anyone's turn
                    assert got.distance == region.distance
                    assert got.n_samples == len(members)
                    assert got.samples.tolist() == members[:3].tolist()
                    assert got.mean_error == pytest.approx(wrong[members].mean())
                    labels = dict(zip(*np.unique(y[members], return_counts=True), strict=True))
                    assert got.labels == labels
            assert found.unreliability == verdict.unreliability[row]
            assert found.accepted == verdict.accepted[row]
            assert found.prediction == verdict.prediction[row]
            assert np.logaddexp(found.log_risk, found.log_gap) == pytest.approx(found.unreliability)
            assert found.risk_share == pytest.approx(np.exp(found.log_risk - found.unreliability))

    def test_reads_as_text(self, guard, digits):
        text = str(guard.explain(digits[2][0][:1], n=2)[0])
        assert re.search(
            r"^prediction \d, unreliability [\d.]+: (accepted|refused) \(the threshold is [\d.]+\)\n", text
        )
        assert re.search(r"nearest training sample \d+ bits away; log density -[\d.]+\n", text)
        assert re.search(r"[\d.]+%: 1 sample \d+ bits away: 1 labelled \d; mean error 0; number \d+", text)
        assert len(text.splitlines()) in (6, 7)

    def test_a_prediction_without_support_is_said(self):
        regions = (RegionShare(3, 1.0, 2, 0.0, {"cat": 2}, np.array([4, 9])),)
        found = Explanation("dog", 5.0, True, 6.0, 3, -4.0, -np.inf, 5.0, 0.0, regions)
        assert str(found).endswith("\n  none of these is labelled dog")
        assert "labelled dog" not in str(replace(found, prediction="cat"))

    def test_patterns_alone_can_be_explained(self, rng):
        bits, errors, labels = rng.random((60, 5)) < 0.5, rng.random(60), rng.integers(0, 2, 60).astype(bool)
        recorded = Recorded(patterns=bits, errors=errors, labels=labels)
        guard = Guard(None, SubfunctionBound(1.0)).fit(recorded, recorded, risk=0.9, verbose=False)
        (found,) = guard.explain(Recorded(patterns=bits[:1]), n=60)
        assert found.prediction is None
        assert sum(region.share for region in found.regions) == pytest.approx(1)
        for region in found.regions:
            members = np.flatnonzero((bits == bits[region.samples[0]]).all(axis=1))
            assert region.mean_error == pytest.approx(errors[members].mean())
            assert region.samples.tolist() == members.tolist()
            assert region.labels == {
                value: count for value in (True, False) if (count := (labels[members] == value).sum())
            }


class TestTrainingDataComesAndGoes:
    @pytest.fixture
    def soft(self, rng):
        """Recordings with errors between 0 and 1, whose sums depend on their order in floats."""
        bits = rng.random((400, 12)) < 0.3
        return [
            Recorded(patterns=bits[s], errors=rng.random(400)[s], labels=rng.integers(0, 3, 400)[s])
            for s in (slice(250), slice(250, 320), slice(320, 400))
        ]

    def refitted(self, *parts):
        bits = np.concatenate([part.patterns.to_bool() for part in parts])
        errors = np.concatenate([part.errors for part in parts])
        return RegionTable.build(PackedPatterns.pack(bits), errors, keep_samples=True)

    def test_added_data_gives_the_table_of_a_fit_on_all(self, soft):
        guard = Guard(None, SubfunctionBound(2.0)).fit(soft[0], soft[2], risk=0.9, verbose=False)
        assert guard.partial_fit(soft[1]) is guard
        assert same_tables(guard.state.table, self.refitted(soft[0], soft[1]))
        again = SubfunctionBound(2.0).fit(
            np.concatenate([part.patterns.to_bool() for part in soft[:2]]), guard.state.samples.errors
        )
        assert np.array_equal(guard.unreliability(soft[2]), again.unreliability(soft[2].patterns))

    def test_forgotten_data_gives_the_table_of_a_fit_without(self, soft, rng):
        guard = Guard(None, SubfunctionBound(2.0)).fit(soft[0], soft[2], risk=0.9, verbose=False)
        gone = rng.choice(250, 120, replace=False)
        guard.forget(gone)
        kept = np.setdiff1d(np.arange(250), gone)
        assert same_tables(guard.state.table, self.refitted(soft[0][kept]))
        assert np.array_equal(guard.state.samples.ids, kept)
        assert np.array_equal(guard.state.samples.labels, soft[0].labels[kept])

    def test_numbers_of_samples_never_shift(self, soft):
        guard = Guard(None, SubfunctionBound(2.0)).fit(soft[0], soft[2], risk=0.9, verbose=False)
        guard.forget([0, 249]).partial_fit(soft[1]).forget([250, 100])
        assert guard.state.samples.ids.tolist() == [i for i in range(320) if i not in (0, 249, 250, 100)]
        rows = np.setdiff1d(np.arange(250), [0, 100, 249])
        assert same_tables(guard.state.table, self.refitted(soft[0][rows], soft[1][1:]))
        assert guard.state.history == ("fit on 250 samples", "forgot 2 samples", "added 70 samples", "forgot 2 samples")

    def test_the_policy_is_found_anew(self, guard, mlp, digits):
        X, y = digits[2]
        before = guard.policy
        guard.partial_fit((X[:200], y[:200]))
        after = guard.policy
        scores = guard.state.score.unreliability(guard.state.calibration.patterns)
        assert after.threshold in scores
        assert after.threshold != before.threshold
        assert np.array_equal(after.accept(scores).sum(), after.n_accepted)

    def test_a_stale_policy_refuses_to_decide(self, guard, digits):
        X, y = digits[2]
        guard.forget(np.arange(50), recalibrate=False)
        message = "The policy is stale: training data came or went since it was calibrated. Call recalibrate() before predict."
        for decide in (guard.predict, guard.wrap, lambda x: guard.evaluate((x, y)), lambda x: guard.policy):
            with pytest.raises(NotFitted, match=re.escape(message)):
                decide(X)
        assert np.isfinite(guard.unreliability(X)).all()
        assert guard.explain(X[:1])[0].accepted is None
        assert "policy is stale" in str(guard.explain(X[:1])[0])
        assert "stale: call recalibrate()" in guard.summary()
        assert "policy is stale" in repr(guard)
        assert guard.recalibrate().predict(X).accepted.any()

    def test_recalibration_takes_other_data_and_another_risk(self, guard, digits):
        test = digits[2]
        guard.recalibrate(test, risk=0.2, confidence=0.8)
        assert (guard.policy.risk, guard.policy.confidence, guard.policy.n_samples) == (0.2, 0.8, len(test[0]))

    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            (
                [700],
                "rows must be numbers of training samples that are still there, from 0 to 699. Got 700 (1 such in all).",
            ),
            (
                [-1, 3, -2],
                "rows must be numbers of training samples that are still there, from 0 to 699. Got -2 (2 such in all).",
            ),
            (np.arange(700), "At least one training sample must stay. Got all 700 to forget; fit anew."),
            ([True, False], "rows must be numbers of training samples. Got bool; use np.flatnonzero of a mask."),
        ],
    )
    def test_rows_that_are_not_there_cannot_be_forgotten(self, guard, rows, message):
        before = guard.state
        with pytest.raises(InvalidInput, match=re.escape(message)):
            guard.forget(rows)
        assert guard.state is before


@pytest.fixture
def wrapped(net, digits):
    guard = Guard(net, SubfunctionBound(3.0)).fit(digits[0], digits[1], risk=0.05, verbose=False)
    return guard, guard.wrap()


class TestWrap:
    def test_forward_gives_output_unreliability_accepted(self, wrapped, digits):
        guard, module = wrapped
        x = torch.tensor(digits[2][0])
        output, unreliability, accepted = module(x)
        verdict = guard.predict(x)
        assert torch.equal(output, verdict.output)
        assert torch.equal(unreliability, verdict.unreliability)
        assert torch.equal(accepted, verdict.accepted)

    def test_it_is_a_module_with_the_networks_weights(self, wrapped, net):
        _, module = wrapped
        assert isinstance(module, nn.Module)
        assert {p.data_ptr() for p in module.parameters()} == {p.data_ptr() for p in net.parameters()}

    def test_it_follows_its_own_weights_and_the_guard(self, wrapped, digits):
        guard, module = wrapped
        x = torch.tensor(digits[2][0])
        twin = copy.deepcopy(module)
        with torch.no_grad():
            for weights in twin.parameters():
                weights.zero_()
        assert not twin(x).output.any()
        before = module(x).unreliability
        guard.forget(np.arange(600))
        assert not torch.equal(module(x).unreliability, before)
        assert torch.equal(module(x).unreliability, guard.predict(x).unreliability)

    def test_it_cannot_be_traced(self, wrapped, digits):
        message = (
            "A guarded module cannot be traced, compiled or exported: its scores are computed outside torch. "
            "Use guard.export(path, example), which writes one ONNX graph of network and guard."
        )
        x = torch.tensor(digits[2][0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of tracing as such
            with pytest.raises(InvalidInput, match=re.escape(message)):
                torch.jit.trace(wrapped[1], x)

    def test_another_network_is_not_wrapped(self, wrapped, net):
        guard, _ = wrapped
        same, other = copy.deepcopy(net), copy.deepcopy(net)
        other[0].weight.data += 1
        assert guard.wrap(same).network is same
        with pytest.raises(InvalidInput, match="another, or the same with other weights; fit a guard for this one"):
            guard.wrap(other)

    def test_only_torch_networks_are_wrapped(self, guard):
        message = "model must be a torch.nn.Module to be wrapped. Got MLPClassifier; use guard.predict."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            guard.wrap()

    def test_inputs_come_by_position_or_by_name(self, wrapped, digits):
        x = torch.tensor(digits[2][0])
        with pytest.raises(InvalidInput, match=r"Inputs must come all by position or all by name. Got both\."):
            wrapped[1](x, mask=x)


class TestRefused:
    @pytest.mark.parametrize(
        "method", ["predict", "explain", "unreliability", "evaluate", "partial_fit", "forget", "recalibrate"]
    )
    def test_what_needs_a_fit(self, mlp, digits, method):
        guard = Guard(mlp)
        message = f"Guard is not fitted. Call fit(train, validation) before {method}."
        arguments = () if method == "recalibrate" else ([0],)
        with pytest.raises(NotFitted, match=re.escape(message)):
            getattr(guard, method)(*arguments)
        assert repr(guard) == "<Guard of MLPClassifier, not fitted>"

    def test_data_without_errors(self, mlp, digits):
        X = digits[0][0]
        message = (
            "train must have an error for each sample. Got no labels; give pairs, as in fit((X, y), (X_val, y_val))."
        )
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Guard(mlp).fit(X, digits[1])

    @pytest.mark.parametrize(
        ("columns", "change", "message"),
        [
            (
                10,
                lambda y: y[:, None],
                "Got labels int64 of shape (700, 1) beside outputs of shape (700, 10); use y.ravel().",
            ),
            (
                10,
                lambda y: np.eye(10)[y],
                (
                    "Got labels float64 of shape (700, 10) beside outputs of shape (700, 10); where these are classes, use "
                    "y.argmax(axis=1)."
                ),
            ),
            (
                10,
                lambda y: y.astype(float),
                (
                    "Got labels float64 of shape (700,) beside outputs of shape (700, 10); where these are classes, use "
                    "y.astype(int), else error=, such as ClippedError(scale=...)."
                ),
            ),
            (
                1,
                lambda y: y % 2,
                (
                    "Got labels int64 of shape (700,) beside outputs of shape (700, 1); for one logit, "
                    "error=lambda output, y: (output > 0) != y."
                ),
            ),
            (
                1,
                lambda y: y * 0.3,
                (
                    "Got labels float64 of shape (700,) beside outputs of shape (700, 1); for anything but classes give "
                    "error=, such as ClippedError(scale=...)."
                ),
            ),
        ],
        ids=["column", "one-hot", "floats", "one logit", "regression"],
    )
    def test_labels_that_give_no_error_have_their_remedy_named(self, digits, columns, change, message):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, columns))
        (X, y), validation, _ = digits
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Guard(net).fit((X, change(y)), validation)

    def test_one_logit_is_guarded_as_the_message_says(self, digits):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
        (X, y), (X_val, y_val), _ = digits
        guard = Guard(net, SubfunctionBound(2.0), error=lambda output, y: (output > 0) != y)
        guard.fit((X, y % 2), (X_val, y_val % 2), risk=0.9, verbose=False)
        with torch.no_grad():
            wrong = (net(torch.tensor(X))[:, 0] > 0).numpy() != y % 2
        assert guard.state.samples.errors.tolist() == wrong.tolist()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"score": 3.0},
                "score must have fit and unreliability, as SubfunctionBound(rho=16.0) has. Got 3.0; leave it out",
            ),
            (
                {"score": SubfunctionBound},
                (
                    "score must have fit and unreliability, as SubfunctionBound(rho=16.0) has. Got <class "
                    "'terrafirma.scores.subfunction.SubfunctionBound'>; leave it out to select one."
                ),
            ),
            ({"error": "abs"}, "error must be a function of (outputs, labels), or ClippedError(scale=...). Got 'abs'."),
            (
                {"layers": nn.ReLU()},
                "layers must be a name, or a list of names. Got ReLU(); leave it out for the last ReLU.",
            ),
        ],
    )
    def test_arguments_of_another_kind(self, mlp, arguments, message):
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Guard(mlp, **arguments)

    def test_validation_too_small_to_be_cut(self, mlp, digits):
        train, (X, y), _ = digits
        message = "validation must have at least 2 samples, to be cut into halves. Got 1; give calibration=, too."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Guard(mlp).fit(train, (X[:1], y[:1]))

    def test_a_guard_of_arrays_has_nothing_to_run(self, digits):
        message = "Give it a Recorded, or make it with Guard(model), or Guard.load(path, model)."
        with pytest.raises(InvalidInput, match=re.escape(message)):
            Guard(None).fit(*digits[:2])

    def test_samples_that_were_used_before(self, guard, mlp, digits):
        train, validation, test = digits
        message = "{} must be other samples than {}: what was used once says nothing new. Got the same; hold some out."
        for call, names in (
            (lambda: Guard(mlp).fit(train, train), ("validation", "train")),
            (lambda: Guard(mlp).fit(train, validation, validation), ("calibration", "validation")),
            (lambda: guard.recalibrate(train), ("calibration", "train")),
            (lambda: guard.partial_fit(validation), ("addition 1", "validation")),
            (lambda: guard.partial_fit(test).partial_fit(test), ("addition 2", "addition 1")),
        ):
            with pytest.raises(InvalidInput, match=re.escape(message.format(*names))):
                call()

    def test_recordings_that_do_not_belong_together(self, mlp, net, digits):
        train, validation, _ = digits
        a, b = record(mlp, train, "hidden_1"), record(mlp, validation, "hidden_2")
        message = (
            "must be recorded as the training data was. Got layers hidden_2 instead of hidden_1; record both alike."
        )
        with pytest.raises(InvalidInput, match=re.escape(f"validation {message}")):
            Guard(None).fit(a, b)
        guard = Guard(None, SubfunctionBound(2.0)).fit(a, record(mlp, validation, "hidden_1"), verbose=False)
        methods = {
            "data": guard.partial_fit,
            "calibration": guard.recalibrate,
            "test": guard.evaluate,
            "x": guard.predict,
        }
        for name, method in methods.items():
            with pytest.raises(InvalidInput, match=re.escape(f"{name} {message}")):
                method(b)
        other = MLPClassifier((64, 48), max_iter=5, random_state=3).fit(*train)
        with pytest.raises(
            InvalidInput, match="validation must be recorded as the training data was. Got network MLPClassifier "
        ):
            Guard(None).fit(a, record(other, validation, "hidden_1"))
        with pytest.raises(
            InvalidInput, match="The network must be the one that the guard was fitted with: MLPClassifier, "
        ):
            Guard(other).fit(a, b)
        bare = Recorded(patterns=np.zeros((9, 5), bool), errors=np.zeros(9))
        with pytest.raises(
            InvalidInput, match="validation must be recorded .* Got 5 units instead of 64; record both alike"
        ):
            Guard(None).fit(a, bare)

    def test_arrays_of_the_user_are_copied(self, rng):
        P, C = (
            Recorded(patterns=rng.random((80, 6)) < 0.4, errors=(rng.random(80) < 0.2).astype(float)) for _ in range(2)
        )
        guard = Guard(None, SubfunctionBound(1.0)).fit(P, C, risk=0.5, verbose=False)
        before = guard.policy.threshold
        C.patterns.words[:] = 0
        C.errors[:] = 0
        P.errors[:] = 1
        assert guard.recalibrate().policy.threshold == before
        assert guard.forget([0]).state.samples.errors.mean() < 0.5

    def test_a_failed_fit_leaves_the_users_score_alone(self, guard, mlp, digits):
        class Fragile:
            """Fails on its second use."""

            fitted = 0

            def fit(self, train, validation):
                self.fitted += 1

            def unreliability(self, recorded):
                raise ZeroDivisionError

        score = Fragile()
        with pytest.raises(ZeroDivisionError):
            Guard(mlp, score).fit(*digits[:2])
        assert score.fitted == 0

    def test_a_failed_fit_changes_nothing(self, guard, digits):
        before = guard.state
        with pytest.raises(InvalidInput, match="risk must lie between 0 and 1"):
            guard.fit(*digits[:2], risk=2.0)
        assert guard.state is before

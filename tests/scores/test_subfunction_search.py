import numpy as np
import pytest

import terrafirma
from terrafirma import metrics, select
from terrafirma.core import _pairs
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.errors import InvalidInput
from terrafirma.scores.subfunction_search import DELTAS, default_rhos


@pytest.fixture
def data(rng):
    centres = rng.random((3, 80)) < 0.5
    noise = rng.random(500) * 0.4  # noisier samples are wrong more often
    X = centres[rng.integers(3, size=500)] ^ (rng.random((500, 80)) < noise[:, None])
    errors = rng.random(500) < noise
    return X[:300], errors[:300], X[300:], errors[300:]


@pytest.mark.parametrize("thresholds", [None, 1000])
@pytest.mark.parametrize("metric", ["aucea", "auroc"])
def test_each_row_is_the_metric_of_that_setting(data, metric, thresholds):
    rhos, deltas = [2.0, 5.0, 20.0], [0.01, 0.9]
    selection = select(*data, rhos=rhos, deltas=deltas, metric=metric, thresholds=thresholds)
    assert [(r.rho, r.delta) for r in selection.table] == [(r, d) for r in rhos for d in deltas]
    X, errors, V, wrong = data
    for row in selection.table:
        scores = terrafirma.SubfunctionBound(row.rho, row.delta).fit(X, errors).unreliability(V)
        assert row.metric == getattr(metrics, metric)(scores, wrong, thresholds=thresholds)
    best = selection.table[np.argmax(selection.table.metric)]
    assert (selection.best.rho, selection.best.delta) == (best.rho, best.delta)


def test_the_best_is_fitted_as_if_alone(data):
    X, errors, V, _ = data
    best = select(*data, rhos=[2.0, 5.0]).best
    alone = terrafirma.SubfunctionBound(best.rho, best.delta).fit(X, errors)
    np.testing.assert_array_equal(best.unreliability(V), alone.unreliability(V))


def test_ties_go_to_the_first_entry(data):
    X, _, V, wrong = data
    selection = select(X, np.zeros(300), V, wrong, rhos=[5.0], deltas=[0.5, 0.001, 0.9])
    assert len(set(selection.table.metric)) == 1
    assert selection.best.delta == 0.5
    constant = select(*data, rhos=[7.0, 5.0], deltas=[0.2, 0.1], metric=lambda u, e: 0.5)
    assert (constant.best.rho, constant.best.delta) == (7.0, 0.2)


def test_without_training_errors_all_deltas_tie():
    """Scores of 2000 rows lie so close that another constant added to each would merge some, and choose delta by it."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        centres = rng.random((4, 128)) < 0.5
        X, V = (centres[rng.integers(4, size=n)] ^ (rng.random((n, 128)) < 0.1) for n in (600, 2000))
        selection = select(X, np.zeros(600), V, rng.random(2000) < 0.2, rhos=[1.0])
        assert len(set(selection.table.metric)) == 1
        assert selection.best.delta == DELTAS[0]


def test_a_grid_compares_no_more_pairs_than_a_single_setting(data, monkeypatch):
    compared = []
    for name in ("count_histograms", "value_histograms"):
        kernel = getattr(_pairs, name)

        def counted(queries, panels, *rest, kernel=kernel):
            compared.append(len(queries) * len(panels))
            kernel(queries, panels, *rest)

        monkeypatch.setattr(_pairs, name, counted)
    select(*data, rhos=[5.0], deltas=[0.1])
    single, compared[:] = sum(compared), []
    select(*data, rhos=[2.0, 3.0, 5.0, 9.0, 20.0])
    assert sum(compared) == single > 0


def test_a_metric_of_ones_own(data):
    selection = select(*data, rhos=[2.0, 5.0, 9.0], deltas=[0.1], metric=lambda u, e: -metrics.aurc(u, e))
    expected = select(*data, rhos=[2.0, 5.0, 9.0], deltas=[0.1])
    assert selection.best.rho == expected.best.rho
    np.testing.assert_allclose(selection.table.metric, expected.table.metric - 1)


def test_published_choices_of_delta(reference):
    """The published code's validation AUCEA for each delta, on its own scores, is about that on ours."""
    train = reference["train_bits"], reference["train_err"]
    val = reference["val_bits"], ~reference["val_correct"]
    for rho in reference["rhos"][:2]:
        table = select(*train, *val, rhos=[rho], deltas=reference["deltas"], thresholds=1000).table
        published = reference[f"rho{rho:g}_val_aucea_per_delta_official"]
        np.testing.assert_allclose(table.metric, published, atol=2e-3)


def test_the_default_grid_spans_the_distances_there_are(data):
    X, errors, V, _ = data
    table = RegionTable.build(PackedPatterns.pack(X), errors)
    rhos = default_rhos(PackedPatterns.pack(V), table)
    distances = (V[:, None, :] ^ X[None, :, :]).sum(axis=2)
    assert rhos[0] == pytest.approx(np.median(distances.min(axis=1)))
    assert abs(rhos[-1] - np.median(distances)) <= 1
    np.testing.assert_allclose(np.diff(np.log(rhos)), np.log(rhos[-1] / rhos[0]) / 8)
    selection = select(*data)
    assert sorted(set(selection.table.rho)) == list(rhos)
    assert len(selection.table) == len(rhos) * len(DELTAS)


def flipped(rng, rows, bits):
    """Each row with that many of its bits changed."""
    return rows ^ (rng.random(rows.shape).argsort(axis=1) < bits)


def test_where_the_narrowest_wins_narrower_ones_are_tried(rng):
    """Right beside a lone sample, wrong at the edge of a crowd: wide kernels see the crowd alone."""
    lone, crowd = rng.random((50, 64)) < 0.5, np.tile(rng.random(64) < 0.5, (200, 1))
    X = np.vstack([lone, flipped(rng, crowd, 6)])
    right, wrong = flipped(rng, lone, 2), flipped(rng, crowd, 8)
    V, errors = np.vstack([right, wrong]), np.repeat([False, True], [50, 200])
    data = X, np.zeros(250), V, errors
    grid = default_rhos(PackedPatterns.pack(V), RegionTable.build(PackedPatterns.pack(X), np.zeros(250)))
    coarse, found = select(*data, rhos=grid), select(*data)
    assert coarse.best.rho == grid[0]
    assert found.best.rho < grid[0]
    assert found.metric > coarse.metric
    np.testing.assert_array_equal(found.table[: len(coarse.table)], coarse.table)
    narrower = found.table.rho[len(coarse.table) :: len(DELTAS)]
    np.testing.assert_allclose(narrower[:-1], grid[0] * 0.5 ** (np.arange(1, len(narrower)) / 2))
    assert narrower[-1] == 1.0
    assert narrower[-2] > 1.0


def test_what_the_best_must_beat(data):
    errors = data[3]
    assert select(*data, rhos=[5.0]).chance == pytest.approx(1 - errors.mean())
    assert select(*data, rhos=[5.0], metric="auroc").chance == 0.5
    assert select(*data, rhos=[5.0], thresholds=1000).chance is None
    assert select(*data, rhos=[5.0], metric=metrics.aucea).chance is None


def test_a_metric_that_fails_says_how_it_was_called(data):
    def other_order(wrong, u):
        if set(wrong) - {0, 1}:
            raise ValueError("wrong must be binary")

    with pytest.raises(ValueError, match="wrong must be binary") as caught:
        select(*data, rhos=[5.0], metric=other_order)
    assert caught.value.__notes__ == [
        "select calls metric(unreliability, errors), in this order; wrap functions that take another."
    ]


def test_the_default_grid_where_all_patterns_are_equal():
    X = np.ones((10, 5), dtype=bool)
    selection = select(X, np.zeros(10), X[:3], np.zeros(3))
    assert len(selection.table) == len(DELTAS)
    assert np.isfinite(selection.table.metric).all()
    assert selection.best.rho == 1.0


def test_the_repr_tells_the_outcome(data):
    selection = select(*data, rhos=[5.0], deltas=[0.1])
    best = "<SubfunctionBound(rho=5.0, delta=0.1) fitted on 300 samples>"
    told = f"metric {selection.metric:.4f} (a random order: {selection.chance:.4f}), 1 settings tried"
    assert repr(selection) == f"<Selection best={best}, {told}>"
    assert "random" not in repr(select(*data, rhos=[5.0], thresholds=1000))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rhos": []}, "rhos must have at least one value to try. Got none; leave it out for the default grid."),
        ({"deltas": []}, "deltas must have at least one value to try. Got none"),
        ({"rhos": [1.0, -1.0]}, "rho must be a positive float .* Got -1.0."),
        ({"deltas": [0.5, 2.0]}, r"delta must lie in \(0, 1\] .* Got 2.0."),
        ({"metric": "accuracy"}, "metric must be 'aucea', 'auroc' or a function. Got 'accuracy'."),
        ({"metric": metrics.auroc, "thresholds": 5}, "thresholds belongs to the named metrics"),
    ],
)
def test_bad_grids_are_named(data, change, message):
    with pytest.raises(InvalidInput, match=message):
        select(*data, **change)


@pytest.mark.parametrize("metric", [metrics.aurc, metrics.e_aurc, metrics.augrc, metrics.fpr_at_tpr])
def test_metrics_that_fall_with_quality_are_refused(data, metric):
    with pytest.raises(InvalidInput, match=f"Got {metric.__name__}, which falls; use lambda u, e: -metrics."):
        select(*data, metric=metric)


def test_a_metric_that_is_not_defined_is_named(data):
    with pytest.raises(
        InvalidInput, match="metric must return one finite number. Got nan; choose one that these rows define."
    ):
        select(*data, rhos=[2.0], metric=lambda u, e: np.nan)


def test_bad_sets_are_named(data):
    X, errors, V, wrong = data
    for call, message in (
        (lambda: select(X[:0], errors[:0], V, wrong), "X_train must have at least one row to fit"),
        (lambda: select(X, errors, V[:0], wrong[:0]), "X_val must have at least one row to select on"),
        (lambda: select(X, errors, V[:, :7], wrong), "X_val must have 80 units, as the training patterns. Got 7"),
        (lambda: select(X, errors[:5], V, wrong), "errors_train must have one entry for each of the 300 rows. Got 5"),
        (lambda: select(X, errors, V, wrong[:5]), "errors_val must have one entry for each of the 200 rows. Got 5"),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()


def test_grids_may_come_one_by_one(data):
    assert select(*data, rhos=np.array(3.0), deltas=0.1).best.rho == 3.0
    expected = select(*data, rhos=[2.0, 5.0], deltas=[0.1, 0.5])
    found = select(*data, rhos=(r for r in (2.0, 5.0)), deltas=np.array([0.1, 0.5]))
    np.testing.assert_array_equal(found.table, expected.table)


def test_a_metric_cannot_change_the_errors(data):
    def spoil(u, e):
        e[:] = 0
        return 0.0

    with pytest.raises(ValueError, match="read-only"):
        select(*data, rhos=[2.0], metric=spoil)


def test_what_is_no_metric_is_named(data):
    with pytest.raises(InvalidInput, match=r"metric must be 'aucea', 'auroc' or a function. Got array"):
        select(*data, metric=np.zeros(3))
    with pytest.raises(InvalidInput, match=r"metric must be 'aucea', 'auroc' or a function. Got \['aucea'\]."):
        select(*data, metric=["aucea"])

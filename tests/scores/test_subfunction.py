import numpy as np
import pytest

import terrafirma
from terrafirma import SubfunctionBound, storage
from terrafirma.core.bound import Smoother, bound_terms
from terrafirma.core.normalizers import log_w, log_z
from terrafirma.core.patterns import PackedPatterns
from terrafirma.core.regions import RegionTable
from terrafirma.core.weighting import Exponential, Gaussian, Tabulated
from terrafirma.errors import BadFile, InvalidInput, NotFitted


def test_reference_values(reference):
    """Every part of the bound, for every rho and delta, to 1e-9."""
    close = {"rtol": 1e-9, "atol": 1e-12}
    keys = ("log_u", "log_z", "log_w", "log_mass", "log_P", "log_emprisk")
    train = PackedPatterns.pack(reference["train_bits"])
    table = RegionTable.build(train, reference["train_err"], keep_samples=True)
    in_their_order = np.empty(len(table), dtype=np.int64)  # theirs: by first appearance
    in_their_order[reference["inv_unique"]] = table.sample_region
    np.testing.assert_array_equal(table.counts[in_their_order], reference["unique_counts"])
    np.testing.assert_array_equal(table.error_sum[in_their_order], reference["unique_err"])
    for rho in reference["rhos"]:
        exact = {key: reference[f"rho{rho:g}_exact_{key}"] for key in keys}
        known = np.isfinite(exact["log_z"])
        np.testing.assert_allclose(log_z(Gaussian(rho), train.n_units)[known], exact["log_z"][known], **close)
        (log_ws,) = log_w(table, [Gaussian(rho)])
        np.testing.assert_allclose(log_ws[in_their_order], exact["log_w"], **close)
        est = SubfunctionBound(rho=rho, delta=0.001).fit(reference["train_bits"], reference["train_err"])
        assert est.log_u_ == pytest.approx(exact["log_u"], rel=1e-9)
        assert len(est.regions_) == len(table)
        assert est.n_samples_ == len(train)
        (sums,) = est._fitted.smoother.sums(PackedPatterns.pack(reference["test_bits"]))
        for j, delta in enumerate(reference["deltas"]):
            terms = bound_terms(sums, delta, est.n_samples_)
            np.testing.assert_allclose(terms.log_density, exact["log_P"], **close)
            np.testing.assert_allclose(terms.log_density + est.log_u_, exact["log_mass"], **close)
            np.testing.assert_allclose(terms.log_risk, exact["log_emprisk"], **close)
            np.testing.assert_allclose(terms.log_gap, reference[f"rho{rho:g}_exact_log_gap"][:, j], **close)
            np.testing.assert_allclose(terms.log_bound, reference[f"rho{rho:g}_exact_log_bound"][:, j], **close)
        np.testing.assert_allclose(
            est.unreliability(reference["test_bits"]), reference[f"rho{rho:g}_exact_log_bound"][:, 0], **close
        )


def test_the_published_implementation_is_ours_plus_a_constant(reference):
    """Where it is finite: its u is wrong, and u moves all scores alike."""
    for rho in reference["rhos"]:
        official = reference[f"rho{rho:g}_log_bound_official"].astype(np.float64)
        est = SubfunctionBound(rho=rho).fit(reference["train_bits"], reference["train_err"])
        (sums,) = est._fitted.smoother.sums(PackedPatterns.pack(reference["test_bits"]))
        ours = [bound_terms(sums, delta, est.n_samples_).log_bound for delta in reference["deltas"]]
        difference = (official - np.transpose(ours))[np.isfinite(official)]
        assert np.ptp(difference) < 2e-5  # single precision
        assert len(difference) > 100


@pytest.mark.parametrize("reference", ["M64"], indirect=True)
def test_wide_kernels_rank_as_density_alone(reference):
    """Where the risk is nothing beside the gap, training errors and delta change no rank."""
    est = SubfunctionBound(rho=reference["rhos"][-1]).fit(reference["train_bits"], reference["train_err"])
    terms = est.terms(reference["test_bits"])
    assert (terms.log_risk - terms.log_gap).max() < -37
    np.testing.assert_array_equal(np.argsort(terms.log_bound), np.argsort(-terms.log_density))


@pytest.fixture
def data(rng):
    return rng.random((120, 70)) < 0.3, rng.random(120) < 0.1, rng.random((30, 70)) < 0.4


@pytest.mark.parametrize(
    "est",
    [
        SubfunctionBound(rho=5.0, delta=0.3),
        SubfunctionBound(rho=0.1 + 0.2, delta=1.0),
        SubfunctionBound(weighting=Exponential(3.0)),
        SubfunctionBound(weighting=Tabulated(-np.sqrt(np.arange(71.0)))),
    ],
)
def test_saved_and_loaded_scores_are_the_same_bits(est, data, tmp_path):
    X, errors, Q = data
    path = tmp_path / "bound.safetensors"
    est.fit(X, errors).save(path)
    loaded = SubfunctionBound.load(path)
    np.testing.assert_array_equal(loaded.unreliability(Q), est.unreliability(Q))
    assert (loaded.delta, loaded.log_u_, loaded.n_samples_, loaded.n_units_) == (est.delta, est.log_u_, 120, 70)
    np.testing.assert_array_equal(loaded.regions_.counts, est.regions_.counts)
    if est.weighting is None:
        assert loaded.rho == est.rho
    loaded.save(path)
    np.testing.assert_array_equal(SubfunctionBound.load(path).unreliability(Q), est.unreliability(Q))


def test_a_broken_file_is_refused(data, tmp_path):
    path = tmp_path / "bound.safetensors"
    SubfunctionBound(rho=5.0).fit(*data[:2]).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(BadFile, match="not a whole safetensors file"):
        SubfunctionBound.load(path)


def test_a_tabulated_gaussian_is_the_gaussian(data):
    X, errors, Q = data
    table = SubfunctionBound(weighting=Tabulated(Gaussian(4.0).log_d(70))).fit(X, errors)
    gaussian = SubfunctionBound(rho=4.0).fit(X, errors)
    np.testing.assert_allclose(table.unreliability(Q), gaussian.unreliability(Q), rtol=1e-12)


def test_delta_enters_last(data):
    X, errors, Q = data
    est = SubfunctionBound(rho=4.0, delta=0.01).fit(X, errors)
    before = est.terms(Q)
    est.delta = 0.5
    after = est.terms(Q)
    np.testing.assert_array_equal(after.log_risk, before.log_risk)
    shift = 0.5 * np.log(np.log(2 / 0.5) / np.log(2 / 0.01))
    np.testing.assert_allclose(after.log_gap - before.log_gap, shift, rtol=1e-10)


def test_fitting_again_forgets_what_was(data, rng):
    X, errors, Q = data
    est = SubfunctionBound(rho=4.0).fit(rng.random((5, 9)) < 0.5, np.ones(5))
    np.testing.assert_array_equal(
        est.fit(X, errors).unreliability(Q), SubfunctionBound(rho=4.0).fit(X, errors).unreliability(Q)
    )
    assert est.n_units_ == 70


def test_a_changed_kernel_asks_for_a_new_fit(data):
    X, errors, Q = data
    est = SubfunctionBound(rho=4.0).fit(X, errors)
    est.rho = 9.0
    with pytest.raises(NotFitted, match=r"fitted with Gaussian\(rho=4.0\) and now has Gaussian\(rho=9.0\). Call fit"):
        est.unreliability(Q)


def test_probabilities_in_place_of_activations_warn(rng):
    probabilities = rng.random((50, 10)) + 1e-3
    with pytest.warns(UserWarning, match="All units are active in all 50 training samples"):
        SubfunctionBound().fit(probabilities, np.zeros(50))
    with pytest.warns(UserWarning, match="All units are active in all 50 training samples"):
        terrafirma.select(probabilities, np.zeros(50), probabilities, np.zeros(50), rhos=[1.0])


def test_the_smallest_delta_is_finite(data):
    X, errors, Q = data
    assert np.isfinite(SubfunctionBound(rho=4.0, delta=5e-324).fit(X, errors).unreliability(Q)).all()


def test_numbers_of_numpy_are_saved(data, tmp_path):
    X, errors, Q = data
    est = SubfunctionBound(rho=np.float32(3.0), delta=np.float32(0.1)).fit(X, errors)
    est.save(tmp_path / "bound")
    np.testing.assert_array_equal(SubfunctionBound.load(tmp_path / "bound").unreliability(Q), est.unreliability(Q))


def test_a_failed_fit_changes_nothing(data):
    X, errors, Q = data
    est = SubfunctionBound(rho=4.0).fit(X, errors)
    before = est.unreliability(Q)
    state = dict(vars(est))
    with pytest.raises(InvalidInput):
        est.fit(X[:, :5], errors * 7.0)
    assert vars(est) == state
    np.testing.assert_array_equal(est.unreliability(Q), before)


def test_a_fit_that_fails_late_changes_nothing(data, monkeypatch):
    X, errors, _ = data
    est = SubfunctionBound(rho=4.0).fit(X, errors)
    state = dict(vars(est))

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(Smoother, "prepare", fail)
    with pytest.raises(MemoryError):
        est.fit(X[:, :5], errors)
    assert vars(est) == state


def test_delta_is_checked_whenever_it_is_used(data, tmp_path):
    X, errors, Q = data
    est = SubfunctionBound(rho=4.0).fit(X, errors)
    est.delta = 2.0
    for use in (lambda: est.unreliability(Q), lambda: est.terms(Q), lambda: est.save(tmp_path / "bound")):
        with pytest.raises(InvalidInput, match=r"delta must lie in \(0, 1\] .* Got 2.0."):
            use()
    assert list(tmp_path.iterdir()) == []


def test_packed_patterns_are_checked_whenever_they_are_used(data):
    X, errors, Q = data
    est, packed = SubfunctionBound(rho=4.0).fit(X, errors), PackedPatterns.pack(Q)
    packed.words[3, -1] |= np.uint64(1 << 63)
    with pytest.raises(InvalidInput, match="Bits beyond unit 70 must be 0."):
        est.unreliability(packed)


def test_a_file_with_impossible_normalisers_is_refused(data, tmp_path):
    X, errors, _ = data
    path = tmp_path / "bound"
    SubfunctionBound(rho=4.0).fit(X, errors).save(path)
    arrays, settings = storage.read_arrays(path, "SubfunctionBound")
    log_ws = arrays["log_w"]
    for bad in (np.full_like(log_ws, np.nan), log_ws[:-1], log_ws.astype(np.float32)):
        storage.write_arrays(path, "SubfunctionBound", arrays | {"log_w": bad}, settings)
        with pytest.raises(BadFile, match="log_w must be finite, one for each region with an error"):
            SubfunctionBound.load(path)


class Fickle:
    """A weighting of somebody else's, that changes its mind and cannot be compared."""

    scale = 1.0

    def log_d(self, M):
        return -self.scale * np.sqrt(np.arange(M + 1.0))

    def __eq__(self, other):
        return np.array([True, False])

    __hash__ = None


def test_weightings_are_compared_by_their_values(data):
    X, errors, Q = data
    est = SubfunctionBound(weighting=Fickle()).fit(X, errors)
    before = est.unreliability(Q)
    est.weighting = Tabulated(-np.sqrt(np.arange(71.0)))
    np.testing.assert_array_equal(est.unreliability(Q), before)
    est.weighting = Fickle()
    est.weighting.scale = 2.0
    with pytest.raises(NotFitted, match="SubfunctionBound was fitted with .* and now has .*Call fit"):
        est.unreliability(Q)


def test_input_is_never_written_to(data):
    X, errors, Q = data
    copies = [a.copy() for a in data]
    for array in data:
        array.setflags(write=False)
    SubfunctionBound(rho=4.0).fit(X, errors).unreliability(Q)
    for array, copy in zip(data, copies, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_the_repr_says_what_it_is(data):
    est = SubfunctionBound(rho=4.0, weighting=Exponential(2.0))
    assert repr(est) == "<SubfunctionBound(rho=4.0, delta=0.001, weighting=Exponential(tau=2.0))>"
    assert repr(SubfunctionBound().fit(*data[:2])) == "<SubfunctionBound(rho=16.0, delta=0.001) fitted on 120 samples>"


@pytest.mark.parametrize("method", ["unreliability", "terms", "save"])
def test_unfitted_use_is_named(method):
    with pytest.raises(NotFitted, match=r"SubfunctionBound is not fitted. Call fit\(X, errors\) before "):
        getattr(SubfunctionBound(), method)("x")


@pytest.mark.parametrize("rho", [0, -1.0, np.nan, np.inf, "wide"])
def test_rho_must_be_positive(data, rho):
    with pytest.raises(InvalidInput, match="rho must be a positive float"):
        SubfunctionBound(rho=rho).fit(*data[:2])


@pytest.mark.parametrize("delta", [0, -0.1, 1.1, np.nan, "small", None])
def test_delta_must_be_a_probability(data, delta):
    with pytest.raises(InvalidInput, match=r"delta must lie in \(0, 1\] \(the bound holds with probability"):
        SubfunctionBound(delta=delta).fit(*data[:2])


def test_weightings_must_be_weightings(data):
    for weighting in ("gaussian", Gaussian):
        with pytest.raises(InvalidInput, match=r"weighting must have log_d\(M\), as Gaussian, .* Got "):
            SubfunctionBound(weighting=weighting).fit(*data[:2])


def test_bad_training_sets_are_named(data):
    X, errors, _ = data
    for fit, message in (
        (lambda: SubfunctionBound().fit(X[:0], errors[:0]), "X must have at least one row to fit. Got none."),
        (lambda: SubfunctionBound().fit(X, errors[:3]), "errors must have one entry for each of the 120 rows. Got 3"),
        (lambda: SubfunctionBound().fit(X[0], errors[:1]), "two dimensions"),
        (lambda: SubfunctionBound().fit(None, errors), "Patterns must be an array of numbers. Got NoneType."),
        (lambda: SubfunctionBound().fit(X, None), "errors must be an array of numbers. Got NoneType."),
        (lambda: SubfunctionBound().fit(np.packbits(X, axis=1), errors), "must be unpacked first"),
    ):
        with pytest.raises(InvalidInput, match=message):
            fit()


def test_terms_show_themselves_in_a_line(data):
    X, errors, Q = data
    terms = SubfunctionBound(rho=4.0).fit(X, errors).terms(Q)
    low, high = terms.log_bound.min(), terms.log_bound.max()
    assert repr(terms) == f"BoundTerms(30 rows, log_bound {low:.4g} to {high:.4g})"
    assert repr(SubfunctionBound().fit(X, errors).terms(Q[:0])) == "BoundTerms(0 rows)"


def test_fitted_names_of_what_is_not_fitted():
    est = SubfunctionBound()
    assert not hasattr(est, "regions_")
    with pytest.raises(
        NotFitted, match=r"SubfunctionBound is not fitted. Call fit\(X, errors\) before reading log_u_."
    ):
        est.log_u_  # noqa: B018
    with pytest.raises(AttributeError, match="SubfunctionBound has no attribute 'classes_'."):
        est.classes_  # noqa: B018


def test_queries_of_another_width_are_named(data):
    X, errors, Q = data
    est = terrafirma.SubfunctionBound(rho=4.0).fit(X, errors)
    with pytest.raises(InvalidInput, match="X must have 70 units, as the training patterns. Got 69; record the same"):
        est.unreliability(Q[:, :-1])


def test_saving_while_another_thread_fits_writes_one_state(data, tmp_path):
    """What is saved is read from one place: parts of two fits never mix."""
    X, errors, _ = data
    est = SubfunctionBound(rho=4.0).fit(X, errors)
    other = SubfunctionBound(rho=4.0).fit(X[:50, :20], errors[:50])
    est.regions_, est.n_units_ = other.regions_, other.n_units_  # as if a fit were half done
    est.save(tmp_path / "bound")
    assert SubfunctionBound.load(tmp_path / "bound").n_units_ == 70


def test_an_equal_weighting_needs_no_new_fit(data):
    X, errors, Q = data
    est = SubfunctionBound(weighting=Tabulated(-np.arange(71.0))).fit(X, errors)
    before = est.unreliability(Q)
    est.weighting = Tabulated(-np.arange(71))
    np.testing.assert_array_equal(est.unreliability(Q), before)

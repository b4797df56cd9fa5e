import mpmath
import numpy as np
import pytest

from terrafirma.errors import InvalidInput
from terrafirma.scores.logits import entropy, margin, max_response


def softmax(row):
    with mpmath.workdps(1000):
        powers = [mpmath.exp(float(x)) for x in row]
        return sorted((p / sum(powers) for p in powers), reverse=True)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0, 300.0])
def test_against_a_thousand_digits(rng, scale):
    logits = scale * rng.normal(size=(20, 5))
    for row, *found in zip(logits, max_response(logits), entropy(logits), margin(logits), strict=True):
        with mpmath.workdps(1000):
            p = softmax(row)
            expected = [1 - p[0], -sum(x * mpmath.log(x) for x in p), 1 - (p[0] - p[1])]
            assert found == pytest.approx([float(x) for x in expected], rel=1e-11, abs=1e-300)


def test_saturated_rows_do_not_tie():
    logits = np.array([[60.0 + i, 0.0, -3.0] for i in range(500)])
    for score in (max_response, entropy, margin):
        assert (np.diff(score(logits)) < 0).all()


def test_classes_have_no_order(rng):
    logits = rng.normal(size=(9, 6))
    for score in (max_response, entropy, margin):
        np.testing.assert_allclose(score(logits), score(logits[:, ::-1]), rtol=1e-14)


@pytest.mark.parametrize("logits", [np.zeros(3), np.zeros((3, 1)), [["a", "b"]], [[0.0, np.nan]], [[np.inf, 0.0]]])
def test_bad_logits_are_named(logits):
    with pytest.raises(InvalidInput, match="logits must be"):
        entropy(logits)


def test_logits_near_the_largest_floats():
    assert entropy([[1e308, -1e308]]).tolist() == [0.0]
    assert margin([[1.7e308, 1.7e308]]) == pytest.approx([1.0])

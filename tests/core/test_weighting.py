import numpy as np
import pytest

from terrafirma.core.weighting import Exponential, Gaussian, Tabulated, Weighting
from terrafirma.errors import InvalidInput


def test_gaussian_by_its_definition():
    for rho in (0.3, 1.0, 16.0, 1e4):
        expected = [-(h * h) / (2 * rho * rho) for h in range(9)]
        np.testing.assert_allclose(Gaussian(rho).log_d(8), expected, rtol=1e-15)


def test_exponential_by_its_definition():
    np.testing.assert_allclose(Exponential(3.0).log_d(5), [-h / 3.0 for h in range(6)], rtol=1e-15)


def test_extreme_widths_neither_warn_nor_give_nan():
    tiny = Gaussian(1e-200).log_d(3)
    assert tiny[0] == 0
    assert (tiny[1:] == -np.inf).all()
    assert not Gaussian(1e200).log_d(3).any()


def test_every_weighting_is_one():
    for weighting in (Gaussian(1.0), Exponential(1.0), Tabulated([0.0, -1.0])):
        assert isinstance(weighting, Weighting)
    assert not isinstance(3.0, Weighting)


@pytest.mark.parametrize("value", [0, -1.0, np.nan, np.inf, -np.inf, "16", None, True, [1.0]])
def test_widths_must_be_positive(value):
    with pytest.raises(InvalidInput, match=r"rho must be a positive float \(the kernel's width in bits\). Got "):
        Gaussian(value)
    with pytest.raises(InvalidInput, match="tau must be a positive float"):
        Exponential(value)


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 1.0],
        [0.0, np.nan],
        [0.0, -np.inf],
        [[0.0]],
        [],
        "abc",
        np.array([-128, 127], dtype=np.int8),  # whose difference wraps around
        np.array(["0", "-1e4000"], dtype=np.longdouble),
        [-1.7e308, -1.7e308],  # twice of which is infinite
    ],
)
def test_tables_must_not_increase(values):
    message = r"log_values must be numbers within \+-1e\+300, one for each distance 0..M, that never increase. Got"
    with pytest.raises(InvalidInput, match=message):
        Tabulated(values)


def test_tables_of_narrow_integers():
    assert Tabulated(np.array([5, 1], dtype=np.uint8)).log_d(1).tolist() == [5.0, 1.0]


def test_equal_tables_are_equal():
    assert Tabulated([0.0, -1.0]) == Tabulated(np.array([0, -1]))
    assert hash(Tabulated([0.0, -1.0])) == hash(Tabulated([0.0, -1.0]))
    assert Tabulated([0.0, -1.0]) != Tabulated([0.0, -2.0])
    assert Tabulated([0.0, -1.0]) != Gaussian(1.0)


def test_widths_of_narrow_floats_are_computed_in_double_precision():
    assert type(Gaussian(np.longdouble(4)).rho) is float
    np.testing.assert_array_equal(Exponential(np.float16(3)).log_d(4096), Exponential(3.0).log_d(4096))


@pytest.mark.parametrize("M", [0, -5, 2.5, True, "12"])
def test_sizes_must_be_positive_integers(M):
    for weighting in (Gaussian(1.0), Exponential(1.0)):
        with pytest.raises(InvalidInput, match="M must be an integer of at least 1. Got"):
            weighting.log_d(M)


def test_tables_must_fit_the_patterns():
    with pytest.raises(InvalidInput, match=r"M \+ 1 = 4 entries for patterns of 3 units. Got 2; give one"):
        Tabulated([0.0, -1.0]).log_d(3)


def test_a_table_is_a_copy_that_cannot_change():
    values = np.array([0.0, -1.0])
    weighting = Tabulated(values)
    values[1] = 5.0
    assert weighting.log_d(1).tolist() == [0.0, -1.0]
    with pytest.raises(ValueError, match="read-only"):
        weighting.log_d(1)[0] = 1.0

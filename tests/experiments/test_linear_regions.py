import numpy as np
import pytest

from terrafirma.experiments.linear_regions import linear_regions


def network(rng, sizes):
    weights = [rng.normal(size=s) for s in zip(sizes, sizes[1:], strict=False)]
    return weights, [rng.normal(size=n) for n in sizes[1:]]


def pattern_at(x, weights, biases):
    """The active units at one point, by running the network."""
    active = []
    for W, b in zip(weights, biases, strict=True):
        before = x @ W + b
        active.append(before > 0)
        x = np.maximum(before, 0)
    return np.concatenate(active)


def area(corners):
    """By triangles from the first corner."""
    a, b, c = corners[0], corners[1:-1], corners[2:]
    return np.abs((b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]).sum() / 2


def inside(x, corners):
    """On the same side of every edge."""
    edge = np.roll(corners, -1, axis=0) - corners
    cross = edge[:, 0] * (x - corners)[:, 1] - edge[:, 1] * (x - corners)[:, 0]
    return (cross >= -1e-12).all() or (cross <= 1e-12).all()


@pytest.mark.parametrize("sizes", [(2, 5), (2, 8, 8), (2, 6, 5, 4)])
def test_each_point_lies_in_the_polygon_of_its_pattern(rng, sizes):
    weights, biases = network(rng, sizes)
    regions = linear_regions(weights, biases, low=-3, high=3)
    by_pattern = {r.pattern.tobytes(): r for r in regions}
    assert len(by_pattern) == len(regions) > 5
    assert sum(area(r.corners) for r in regions) == pytest.approx(36, rel=1e-12)
    for x in rng.uniform(-3, 3, size=(500, 2)):
        assert inside(x, by_pattern[pattern_at(x, weights, biases).tobytes()].corners)


def test_the_middle_of_each_polygon_has_its_pattern(rng):
    weights, biases = network(rng, (2, 10, 10))
    for region in linear_regions(weights, biases, low=-2, high=2):
        if area(region.corners) > 1e-9:
            np.testing.assert_array_equal(pattern_at(region.corners.mean(axis=0), weights, biases), region.pattern)


def test_one_line_makes_two_regions():
    regions = linear_regions([np.array([[1.0], [0.0]])], [np.array([0.0])], low=-1, high=1)
    assert sorted((area(r.corners), bool(r.pattern[0])) for r in regions) == [(2.0, False), (2.0, True)]


def test_units_that_never_change_cut_nothing():
    weights = [np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])]
    (region,) = linear_regions(weights, [np.array([1.0, -1.0, 5.0])], low=-1, high=1)
    assert region.pattern.tolist() == [True, False, True]


def test_lines_through_a_corner_or_along_an_edge():
    weights = [np.array([[1.0, 1.0], [0.0, 1.0]])]
    regions = linear_regions(weights, [np.array([-1.0, 0.0])], low=-1, high=1)
    assert sorted(area(r.corners) for r in regions) == [2.0, 2.0]

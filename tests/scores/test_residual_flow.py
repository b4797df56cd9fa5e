"""Residual flow density: against closed forms, a slow twin, dense matrices and numerical integrals."""

import math
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from terrafirma import Recorded, scores
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.metrics import auroc
from terrafirma.scores.flow import log_det as log_dets
from terrafirma.scores.flow import training
from terrafirma.scores.flow.blocks import ActNorm, Flow, ResidualBlock, Squeeze
from terrafirma.scores.flow.lipschitz import COEFFICIENT, LipschitzConv, LipschitzLinear, LipSwish
from terrafirma.scores.flow.log_det import Roulette, Truncated, exact, no_log_det
from terrafirma.scores.flow.scaling import LEVELS, Scaling
from terrafirma.scores.residual_flow import ResidualFlow

QUICK = {"blocks": 2, "width": 16, "epochs": 3, "device": "cpu"}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """So small are these networks that several threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def features(x):
    return Recorded(features=x)


def images(x):
    return Recorded(inputs=x)


def log_density(score, x):
    """In nats."""
    return -score.unreliability(features(x)) * x.shape[1] * math.log(2)


def gaussian(d, seed):
    """Correlated, off the origin: mean, Cholesky factor, log-density."""
    rng = np.random.default_rng(seed)
    root = rng.normal(size=(d, d))
    factor = np.linalg.cholesky(root @ root.T / d + 0.1 * np.eye(d))
    mean = rng.normal(size=d) * 3

    def true(x):
        z = np.linalg.solve(factor, (x - mean).T).T
        return -0.5 * (z**2).sum(axis=1) - 0.5 * d * math.log(2 * math.pi) - np.log(np.diag(factor)).sum()

    return mean, factor, true


def drawn(d, n, seed):
    mean, factor, _ = gaussian(d, 7)
    return mean + np.random.default_rng(seed).normal(size=(n, d)) @ factor.T


@pytest.fixture(scope="module")
def trained():
    """A flow of two dimensions, well trained."""
    return ResidualFlow(on="features", width=64, epochs=15, device="cpu").fit(features(drawn(2, 2000, 0)))


def linear_case(rng, d=4, largest=0.65):
    """A symmetric matrix of known eigenvalues, samples, and what it makes of them."""
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    eigenvalues = np.linspace(0.2, largest, d)
    W = torch.from_numpy(basis * eigenvalues @ basis.T).requires_grad_()
    x = torch.from_numpy(rng.normal(size=(64, d)))
    return W, x, float(np.log1p(eigenvalues).sum())


# ------------------------------------------------------------------------------------------------ slow twin


def naive_bits(score, sample):
    """One vector through all parts, number by number; Jacobians from the chain rule, written out."""
    weights = {name: value.astype(np.float64) for name, value in score.weights_.items()}
    d = len(sample)
    x = [(float(sample[i]) - score.mean_[0, i]) / score.scale_[0, i] for i in range(d)]
    log_volume = -sum(math.log(score.scale_[0, i]) for i in range(d))

    def swish(h, log_beta):
        beta = math.exp(log_beta)
        gate = 1 / (1 + math.exp(-beta * h))
        return h * gate / 1.1, (gate + beta * h * gate * (1 - gate)) / 1.1

    for part in range(1 + 2 * score.blocks):
        if part % 2 == 0:
            log_scale, shift = weights[f"parts.{part}.log_scale"][0], weights[f"parts.{part}.shift"][0]
            x = [(x[i] + shift[i]) * math.exp(log_scale[i]) for i in range(d)]
            log_volume += sum(log_scale)
            continue
        values, jacobian = list(x), np.eye(d)
        for layer in range(3):
            if layer:
                pairs = [swish(h, float(weights[f"parts.{part}.bends.{layer - 1}.log_beta"])) for h in values]
                values = [value for value, _ in pairs]
                jacobian = np.array([slope * jacobian[i] for i, (_, slope) in enumerate(pairs)])
            W, b = (weights[f"parts.{part}.layers.{layer}.{kind}"] for kind in ("weight", "bias"))
            values = [b[j] + sum(W[j, i] * values[i] for i in range(len(values))) for j in range(len(b))]
            jacobian = W @ jacobian
        x = [x[i] + values[i] for i in range(d)]
        log_volume += math.log(abs(np.linalg.det(np.eye(d) + jacobian)))
    log_normal = sum(-0.5 * v * v - 0.5 * math.log(2 * math.pi) for v in x)
    return -(log_normal + log_volume) / d / math.log(2)


def test_the_slow_twin_agrees(trained):
    x = drawn(2, 5, 3)
    np.testing.assert_allclose(trained.unreliability(features(x)), [naive_bits(trained, row) for row in x], rtol=1e-9)


def test_pixels_lie_amid_their_levels_and_their_volume_is_counted():
    pixels = torch.tensor([[0, 128, 255]], dtype=torch.uint8)
    z, log_volume = Scaling(None, None).scoring(pixels)
    slopes = []
    for i, level in enumerate((0, 128, 255)):
        share = 0.05 + 0.9 * (level + 0.5) / 256
        assert z[0, i].item() == pytest.approx(math.log(share / (1 - share)), abs=1e-12)
        slopes.append(0.9 / 256 / share / (1 - share))
    assert log_volume.item() == pytest.approx(sum(map(math.log, slopes)), abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    levels = [
        (torch.sigmoid(Scaling(None, None).training(pixels, generator)[0]) - 0.05) / 0.9 * LEVELS - pixels
        for _ in range(200)
    ]
    spread = torch.cat(levels)
    assert 0 <= spread.min() < 0.1
    assert 0.9 < spread.max() <= 1 + 1e-3


def test_moments_do_not_depend_on_blocks_of_rows(rng, monkeypatch):
    data = rng.normal(size=(37, 3, 2, 2)) + 1e6
    found = Scaling.learn(data)
    np.testing.assert_allclose(found.mean[0, :, 0, 0], data.mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.scale[0, :, 0, 0], data.std(axis=(0, 2, 3)), rtol=1e-6)
    monkeypatch.setattr("terrafirma.scores.flow.scaling.ROWS", 5)
    np.testing.assert_allclose(Scaling.learn(data).scale, found.scale, rtol=1e-9)


# ------------------------------------------------------------------------------------------ log-determinants


def test_exact_is_the_log_determinant_of_identity_and_matrix(rng):
    W, x, true = linear_case(rng)
    np.testing.assert_allclose(exact(lambda v: v @ W.detach(), x), true, rtol=0, atol=1e-12)
    asymmetric = torch.from_numpy(0.3 * rng.normal(size=(5, 5)) / math.sqrt(5))
    x = torch.from_numpy(rng.normal(size=(3, 5)))
    expected = np.linalg.slogdet(np.eye(5) + asymmetric.numpy())[1]
    np.testing.assert_allclose(exact(lambda v: v @ asymmetric, x), expected, rtol=0, atol=1e-12)


def test_the_cut_series_comes_near_with_many_probes(rng):
    W, x, true = linear_case(rng)
    x = x[:1]
    found = np.array([Truncated(seed, terms=40, probes=1)(lambda v: v @ W.detach(), x).item() for seed in range(2000)])
    assert abs(found.mean() - true) < 4 * found.std() / math.sqrt(len(found))
    diagonal = torch.diag(torch.linspace(0.1, 0.6, 4, dtype=torch.float64))  # where signs leave no variance
    assert Truncated(0, terms=40)(lambda v: v @ diagonal, x).item() == pytest.approx(
        math.log(np.prod(1 + np.linspace(0.1, 0.6, 4))), abs=1e-9
    )


def test_the_tail_of_the_series_is_as_bounded_as_said():
    """The docstring's 0.06 nats for each dimension and block: all layers at their largest norm, no slope below 1."""
    slope = COEFFICIENT**3
    tail = sum(slope**k / k for k in range(log_dets.TERMS + 1, 2000))
    assert 0.05 < tail < 0.06
    assert sum(0.5**k / k for k in range(log_dets.TERMS + 1, 100)) < 1e-7


class _NoReweighting(Roulette):
    def weights(self):
        return [1.0 for _ in super().weights()]


@pytest.mark.parametrize(("kind", "is_right"), [(Roulette, True), (_NoReweighting, False)])
def test_roulette_is_unbiased_and_so_is_its_gradient(rng, kind, is_right):
    W, x, true = linear_case(rng)
    estimate = kind(np.random.default_rng(5), torch.Generator().manual_seed(5))
    slope = np.linalg.inv(np.eye(4) + W.detach().numpy()).T
    values, slopes = [], []
    for _ in range(1500):
        found = estimate(lambda v: v @ W, x).mean()
        values.append(found.item())
        slopes.append(torch.autograd.grad(found, W)[0].numpy())
    off = abs(np.mean(values) - true) / (np.std(values) / math.sqrt(len(values)))
    steep = np.abs(np.mean(slopes, axis=0) - slope) / (np.std(slopes, axis=0) / math.sqrt(len(slopes)))
    assert (off < 4) == is_right
    assert (steep.max() < 4.5) == is_right


# --------------------------------------------------------------------------------------------------- blocks


def dense(layer, maps):
    """The matrix of a convolution, column by column."""
    channels = layer.weight.shape[1]
    units = torch.eye(channels * math.prod(maps), dtype=layer.weight.dtype).reshape(-1, channels, *maps)
    return layer.product(units, layer.weight).flatten(1).T.detach().numpy()


def test_no_layer_stretches_more_than_the_coefficient(rng):
    generator = torch.Generator().manual_seed(3)
    for inputs, outputs in ((1, 7), (30, 20), (64, 64)):
        layer = LipschitzLinear(inputs, outputs, generator, gain=5.0).double()
        layer.freeze()
        assert np.linalg.svd(layer.weight.detach().numpy())[1][0] == pytest.approx(COEFFICIENT, rel=1e-6)
    for side, maps in ((3, (4, 5)), (3, (1, 1)), (1, (4, 5))):
        layer = LipschitzConv((2, 3), side, maps, generator, gain=5.0).double()
        layer.freeze()
        assert np.linalg.norm(dense(layer, maps), 2) == pytest.approx(COEFFICIENT, rel=1e-6)
    slack = LipschitzLinear(4, 4, generator, gain=0.01).double()
    before = slack.weight.detach().clone()
    slack.freeze()
    assert torch.equal(slack.weight, before)  # bounded, not normalised


def test_the_transposed_map_is_the_transposed_one():
    generator = torch.Generator().manual_seed(3)
    for layer, x, y in (
        (LipschitzLinear(4, 6, generator), torch.randn(1, 4), torch.randn(1, 6)),
        (LipschitzConv((2, 3), 3, (4, 5), generator), torch.randn(1, 2, 4, 5), torch.randn(1, 3, 4, 5)),
    ):
        there, back = (layer.product(x, layer.weight) * y).sum(), (layer.transposed(y, layer.weight) * x).sum()
        assert there.item() == pytest.approx(back.item(), rel=1e-4)


def test_all_layers_of_a_trained_flow_are_bounded(trained):
    for name, weight in trained.weights_.items():
        if name.endswith("weight"):
            assert np.linalg.norm(weight.astype(np.float64), 2) <= COEFFICIENT * (1 + 1e-6)


def test_a_layer_that_is_zero_does_no_harm():
    layer = LipschitzLinear(3, 3, torch.Generator().manual_seed(0), gain=0.0)
    layer.iterate(5)
    assert torch.isfinite(layer(torch.ones(2, 3))[0]).all()
    assert layer.right.norm().item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("log_beta", [-2.0, 0.0, 3.0])
def test_slopes_of_the_activation_are_at_most_one(log_beta):
    swish = LipSwish()
    swish.log_beta.data.fill_(log_beta)
    x = torch.linspace(-50, 50, 200_001, dtype=torch.float64).requires_grad_()
    values, slopes = swish.double()(x)
    (slope,) = torch.autograd.grad(values.sum(), x)
    np.testing.assert_allclose(slopes.detach(), slope, rtol=0, atol=1e-12)
    assert 0.99 < slope.abs().max().item() <= 1.0


def strong(shape, width=16):
    """A flow whose layers are all as long as they may be."""
    flow = Flow(shape, 3, width, seed=1)
    flow.begin(torch.randn(50, *shape, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        for layer in flow.lipschitz():
            layer.weight *= 30.0
    weights = flow.frozen_weights()
    return Flow(shape, 3, width).load(weights)


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 8, 8), (2, 5, 3)], ids=str)
def test_blocks_and_flows_invert(rng, shape):
    flow = strong(shape)
    x = torch.from_numpy(rng.normal(size=(6, *shape)))
    for part in flow.parts:
        y = part(x, no_log_det)[0]
        np.testing.assert_allclose(part.inverse(y), x, rtol=0, atol=1e-9)
        if isinstance(part, ResidualBlock):
            assert (y - x).abs().max() > 0.02  # not by doing nothing
        x = y
    np.testing.assert_allclose(flow(flow.inverse(x), no_log_det)[0], x, rtol=0, atol=1e-5)


def test_the_log_determinant_of_a_flow_is_that_of_its_whole_jacobian(rng):
    for shape in ((3,), (1, 8, 8)):
        flow = strong(shape)
        x = torch.from_numpy(rng.normal(size=(2, *shape)))
        found = flow(x, exact)[1]
        h = 1e-6
        for row in range(2):
            columns = []
            for unit in torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape):
                ends = [flow((x[row] + step * unit)[None], no_log_det)[0].flatten() for step in (h, -h)]
                columns.append((ends[0] - ends[1]) / (2 * h))
            sign, expected = np.linalg.slogdet(torch.stack(columns, dim=1).numpy())
            assert sign == 1
            assert found[row].item() == pytest.approx(expected, abs=1e-5)


def test_images_are_halved_while_they_are_large_and_even():
    def scales(shape):
        return sum(isinstance(part, Squeeze) for part in Flow(shape, 1, 4).parts) + 1

    assert [scales(shape) for shape in ((3, 32, 32), (1, 28, 28), (1, 8, 8), (1, 9, 8), (1, 4, 4))] == [3, 3, 2, 1, 1]


def test_actnorm_begins_standardised(rng):
    x = torch.from_numpy(rng.normal(size=(200, 3, 4, 4)) * 5 + 2)
    x[:, 2] = 7.0
    part = ActNorm((3, 4, 4)).double()
    part.begin(x)
    y = part(x, no_log_det)[0]
    np.testing.assert_allclose(y.mean(dim=(0, 2, 3)).detach(), 0, atol=1e-9)
    np.testing.assert_allclose(y.std(dim=(0, 2, 3), correction=0).detach(), [1, 1, 0], atol=1e-9)


# ------------------------------------------------------------------------------------------------- densities


@pytest.mark.parametrize("d", [2, 6])
def test_a_gaussian_is_learned(d):
    score = ResidualFlow(on="features", width=64, epochs=15, device="cpu").fit(features(drawn(d, 2000, 0)))
    held_out = drawn(d, 1000, 1)
    apart = gaussian(d, 7)[2](held_out) - log_density(score, held_out)
    assert abs(apart.mean()) < 0.1
    assert len(score.losses_) == 15
    assert score.losses_[-1] < score.losses_[0]


def test_densities_integrate_to_one(trained, rng):
    mean, factor, _ = gaussian(2, 7)
    steps = np.linspace(-9, 9, 200)
    z = np.stack(np.meshgrid(steps, steps), axis=-1).reshape(-1, 2)
    cell = (steps[1] - steps[0]) ** 2 * np.diag(factor).prod()
    assert np.exp(log_density(trained, mean + z @ factor.T)).sum() * cell == pytest.approx(1, abs=1e-3)
    two_hills = np.concatenate([rng.normal(-3, 0.5, 200), rng.normal(2, 1.0, 200)])[:, None]
    line = ResidualFlow(on="features", epochs=20, width=32, device="cpu").fit(features(two_hills))
    x = np.linspace(-40, 40, 8001)[:, None]
    density = np.exp(log_density(line, x))
    assert density.sum() * 0.01 == pytest.approx(1, abs=1e-3)
    assert density[3700] > density[3950]  # at -3, and between the hills


def test_the_cut_series_serves_beyond_small_dimensions(rng, monkeypatch):
    x = rng.normal(size=(40, 140))
    x[:, 70:] += x[:, :70]
    score = ResidualFlow(on="features", **QUICK).fit(features(x))
    found = score.unreliability(features(x))
    monkeypatch.setattr("terrafirma.scores.residual_flow.EXACT", 140)
    right = score.unreliability(features(x))
    assert np.abs(found - right).max() < 0.02  # bits per dimension
    assert np.corrcoef(found, right)[0, 1] > 0.999
    assert not np.array_equal(found, right)


@pytest.mark.parametrize("d", [6, 140])
def test_what_else_is_scored_does_not_matter(d, rng):
    x = rng.normal(size=(60, d))
    score = ResidualFlow(on="features", **QUICK).fit(features(x))
    whole = score.unreliability(features(x))
    alone = [score.unreliability(features(row[None])) for row in x[:9]]
    np.testing.assert_allclose(np.concatenate(alone), whole[:9], rtol=1e-9)
    order = rng.permutation(60)
    np.testing.assert_allclose(score.unreliability(features(x[order])), whole[order], rtol=1e-9)
    assert score.unreliability(features(x[:0])).shape == (0,)


def test_blocks_of_rows_do_not_matter(rng, monkeypatch):
    x = rng.integers(0, 256, (20, 8, 8), dtype=np.uint8)
    score = ResidualFlow(**QUICK).fit(images(x))
    whole = score.unreliability(images(x))
    monkeypatch.setattr("terrafirma.scores.residual_flow.NUMBERS", 3 * 64 * 64)
    np.testing.assert_allclose(score.unreliability(images(x)), whole, rtol=1e-9)


def test_units_change_the_bits_by_their_log(rng):
    x = rng.normal(size=(50, 3))
    ours, scaled = (ResidualFlow(on="features", **QUICK).fit(features(k * x)) for k in (1.0, 8.0))
    np.testing.assert_allclose(scaled.unreliability(features(8 * x)), ours.unreliability(features(x)) + 3, rtol=1e-4)


def test_far_away_is_less_likely(trained):
    near = trained.unreliability(features(drawn(2, 100, 1)))
    for direction in np.eye(2):
        far = trained.unreliability(features(direction * np.array([[20.0], [1e3], [1e6], [1e100]]) * [[1, 1]]))
        assert near.max() < far[0]
        assert (np.diff(far) > 0).all()


EDGES = {
    "one sample": lambda rng: rng.normal(size=(1, 3)),
    "one feature": lambda rng: rng.normal(size=(30, 1)),
    "constant feature": lambda rng: rng.normal(size=(30, 3)) * [1, 0, 1] + [0, 5, 0],
    "all constant": lambda rng: np.full((30, 3), 1e6),
    "duplicated": lambda rng: np.repeat(rng.normal(size=(2, 3)), 15, axis=0),
    "more features than samples": lambda rng: rng.normal(size=(4, 20)),
    "far from 0": lambda rng: rng.normal(size=(30, 3)) + 1e6,
    "float32": lambda rng: rng.normal(size=(30, 3)).astype(np.float32),
    "tiny": lambda rng: rng.normal(size=(30, 3)) * 1e-150,
    "integers": lambda rng: rng.integers(-5, 5, (30, 3)),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edges_are_finite_and_far_samples_less_likely(edge, rng):
    x = EDGES[edge](rng)
    score = ResidualFlow(on="features", **QUICK).fit(features(x))
    near = score.unreliability(features(x))
    assert np.isfinite(near).all()
    assert np.isfinite(score.losses_).all()
    far = score.unreliability(features(x[:1] + 30 * (1 + x.astype(np.float64).std(axis=0))))
    assert far.min() > near.max()


def test_single_and_double_precision_agree(rng):
    x = rng.normal(size=(30, 3)).astype(np.float32)
    score = ResidualFlow(on="features", **QUICK).fit(features(x))
    np.testing.assert_allclose(
        score.unreliability(features(x)), score.unreliability(features(x.astype(np.float64))), rtol=1e-9
    )


def test_an_overflow_is_an_error(trained):
    with pytest.raises(InvalidInput, match=re.escape("The score residual_flow must be a finite number. Got ")):
        trained.unreliability(features(np.full((1, 2), 1e300)))


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    chosen = X[y < 5].reshape(-1, 8, 8)
    return (chosen * 15.9).astype(np.uint8)


@pytest.mark.parametrize("kind", ["pixels", "floats with a channel", "vectors of pixels"])
def test_noise_is_no_digit(kind, digits, rng):
    noise = rng.integers(0, 255, (60, 8, 8), dtype=np.uint8)

    def shaped(x):
        return {"pixels": x, "floats with a channel": x[:, None] / 16.0, "vectors of pixels": x.reshape(len(x), -1)}[
            kind
        ]

    epochs = 12 if kind == "floats with a channel" else 4
    score = ResidualFlow(blocks=1, width=16, epochs=epochs, batch_size=64, device="cpu").fit(
        images(shaped(digits[:300]))
    )
    u = [score.unreliability(images(shaped(x))) for x in (digits[300:360], noise)]
    assert auroc(np.concatenate(u), np.repeat([0, 1], 60)) > 0.9
    if kind == "pixels":
        assert 4 < u[0].mean() < 8  # evenly spread pixels take 8 bits


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("pixels", [False, True])
def test_saved_and_loaded_scores_are_equal(tmp_path, rng, pixels):
    x = rng.integers(0, 256, (12, 8, 8), dtype=np.uint8) if pixels else rng.normal(size=(12, 5))
    recorded = Recorded(inputs=x)
    score = ResidualFlow(**QUICK, checkpoint=tmp_path / "training").fit(recorded)
    score.save(tmp_path / "score")
    loaded = scores.load(tmp_path / "score")
    np.testing.assert_array_equal(loaded.unreliability(recorded), score.unreliability(recorded))
    assert (loaded.losses_, loaded.shape_) == (score.losses_, score.shape_)


class Killed(Exception):
    pass


def kill_after(monkeypatch, calls):
    """Let training end in the midst of an epoch."""
    whole, seen = Roulette.__call__, []

    def call(self, pull, x):
        seen.append(1)
        if len(seen) > calls:
            raise Killed
        return whole(self, pull, x)

    monkeypatch.setattr(Roulette, "__call__", call)


@pytest.mark.parametrize("shape", [(3,), (1, 8, 8)], ids=str)
@pytest.mark.parametrize("calls", [3, 12])
def test_a_killed_training_ends_in_the_same_weights(tmp_path, rng, shape, calls):
    """Four blocks' calls a batch, two batches an epoch."""
    blocks = 4 if len(shape) == 1 else 2
    x = rng.normal(size=(20, *shape))
    settings = {"blocks": blocks, "width": 8, "epochs": 3, "batch_size": 10, "device": "cpu"}
    whole = ResidualFlow(**settings).fit(images(x))
    path = tmp_path / "training"
    with pytest.MonkeyPatch.context() as patch:
        kill_after(patch, calls)
        with pytest.raises(Killed):
            ResidualFlow(**settings, checkpoint=path).fit(images(x))
    assert path.exists()
    resumed = ResidualFlow(**settings, checkpoint=path).fit(images(x))
    assert resumed.losses_ == whole.losses_
    assert set(resumed.weights_) == set(whole.weights_)
    for name, weight in whole.weights_.items():
        np.testing.assert_array_equal(resumed.weights_[name], weight)
    again = ResidualFlow(**settings, checkpoint=path).fit(images(x))  # all is done
    np.testing.assert_array_equal(again.unreliability(images(x)), whole.unreliability(images(x)))


def test_a_resumed_training_does_not_begin_anew(tmp_path, rng, monkeypatch):
    x = rng.normal(size=(20, 3))
    path = tmp_path / "training"
    ResidualFlow(on="features", **QUICK, checkpoint=path).fit(features(x))
    monkeypatch.setattr(training._Run, "epoch", None)  # would fail
    ResidualFlow(on="features", **QUICK, checkpoint=path).fit(features(x))


def test_another_training_is_not_resumed(tmp_path, rng):
    x = rng.normal(size=(20, 3))
    path = tmp_path / "training"
    ResidualFlow(on="features", **QUICK, checkpoint=path).fit(features(x))
    for other, data, changes in (
        ("seed, epochs", x, {"seed": 1, "epochs": 4}),
        ("data", x[::-1], {}),
        ("shape", x[:, :2], {}),
    ):
        expected = (
            "checkpoint must be None, a new file, or one of training with the same data and settings. "
            f"Got {path}, which is of other {', '.join(sorted(other.split(', ')))}; name another file."
        )
        with pytest.raises(InvalidInput, match=re.escape(expected)):
            ResidualFlow(on="features", **(QUICK | changes), checkpoint=path).fit(features(data))


def test_what_is_no_checkpoint_is_refused(tmp_path, rng):
    x = rng.normal(size=(20, 3))
    path = tmp_path / "other"
    features(x).save(path)
    with pytest.raises(BadFile, match=re.escape(f"{path} holds a Recorded, not a FlowTraining. ")):
        ResidualFlow(on="features", **QUICK, checkpoint=path).fit(features(x))
    training.storage.write_arrays(path, training.KIND, {}, {"of": {}})
    expected = f"{path} does not hold a whole training (KeyError('plan')). Name another file."
    with pytest.raises(BadFile, match=re.escape(expected)):
        ResidualFlow(on="features", **QUICK, checkpoint=path).fit(features(x))
    nowhere = tmp_path / "no" / "folder"
    with pytest.raises(BadFile, match=re.escape(f"{nowhere} cannot be written: its folder does not exist.")):
        ResidualFlow(on="features", **QUICK, checkpoint=nowhere).fit(features(x))


# ------------------------------------------------------------------------------------------------------ habits


def test_fits_repeat_and_seeds_matter(rng):
    x = rng.normal(size=(30, 3))
    first, second, third = (
        ResidualFlow(on="features", **QUICK, seed=seed).fit(features(x)) for seed in (0, 0, 2**70 + 1)
    )
    np.testing.assert_array_equal(first.unreliability(features(x)), second.unreliability(features(x)))
    assert not np.array_equal(first.unreliability(features(x)), third.unreliability(features(x)))


def test_torch_is_left_as_it_was(rng):
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    x = rng.normal(size=(30, 3))
    ResidualFlow(on="features", **QUICK).fit(features(x)).unreliability(features(x))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


def test_the_module_comes_without_torch():
    code = "import sys, terrafirma.scores.residual_flow; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_what_it_needs_depends_on_what_it_is_of():
    assert scores.get("residual_flow").needs == {"inputs"}
    assert scores.get("residual_flow", on="features").needs == {"features"}
    assert scores.get("residual_flow", variant="published").needs == {"inputs"}


BAD = {
    "on": ({"on": "logits"}, "on must be 'inputs' or 'features'. Got 'logits'."),
    "published": (
        {"on": "features", "variant": "published"},
        "on must be 'inputs' for the published variant, whose density is the image's. Got 'features'; leave it out.",
    ),
    "variant": (
        {"variant": "mine"},
        "variant must be None (done right) or 'published' (as in the paper's numbers). Got 'mine'.",
    ),
    "blocks": ({"blocks": 0}, "blocks must be an integer of at least 1. Got 0."),
    "width": ({"width": 2.5}, "width must be an integer of at least 1. Got 2.5."),
    "epochs": ({"epochs": -1}, "epochs must be an integer of at least 1. Got -1."),
    "batch_size": ({"batch_size": True}, "batch_size must be an integer of at least 1. Got True."),
    "seed": ({"seed": -1}, "seed must be an integer of at least 0. Got -1."),
    "learning_rate": (
        {"learning_rate": 0},
        "learning_rate must be a positive float (the length of Adam's first steps). Got 0.",
    ),
    "device": ({"device": None}, "device must be text. Got None."),
    "checkpoint": ({"checkpoint": 3}, "checkpoint must be text. Got 3."),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_hyperparameters_are_refused(which):
    settings, sentence = BAD[which]
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        scores.get("residual_flow", **settings)


def test_bad_samples_are_refused(rng):
    deep = "inputs must be vectors (n, d) or images (n, H, W) or (n, C, H, W). Got shape (5, 1, 2, 2, 2); reshape them."
    with pytest.raises(InvalidInput, match=re.escape(deep)):
        ResidualFlow(**QUICK).fit(images(np.zeros((5, 1, 2, 2, 2))))
    empty = "features must have at least one column. Got none; residual_flow needs some."
    with pytest.raises(InvalidInput, match=re.escape(empty)):
        ResidualFlow(on="features", **QUICK).fit(features(np.zeros((5, 0))))
    score = ResidualFlow(**QUICK).fit(images(rng.integers(0, 256, (5, 4, 4), dtype=np.uint8)))
    other = "inputs must be uint8 of shape (n, 1, 4, 4), as the training data. Got float64 of shape (5, 1, 4, 4)."
    with pytest.raises(InvalidInput, match=re.escape(other)):
        score.unreliability(images(np.zeros((5, 1, 4, 4))))
    narrow = ResidualFlow(on="features", **QUICK).fit(features(rng.normal(size=(5, 3))))
    wide = "features must be numbers of shape (n, 3), as the training data. Got float64 of shape (5, 4)."
    with pytest.raises(InvalidInput, match=re.escape(wide)):
        narrow.unreliability(features(np.zeros((5, 4))))


def test_a_device_that_is_not_there_is_refused(rng):
    x = rng.normal(size=(5, 3))
    for device in ("abacus", "cuda:99"):
        expected = f"device must be 'auto' or a device that torch has here. Got {device!r} ("
        with pytest.raises(InvalidInput, match=re.escape(expected)):
            ResidualFlow(on="features", **(QUICK | {"device": device})).fit(features(x))


def test_a_training_that_diverges_says_so(rng):
    expected = (
        "learning_rate must be small enough for training to stay finite. "
        "Got 1e+30, and nan bits per dimension in epoch 1; lower it."
    )
    with pytest.raises(InvalidInput, match=re.escape(expected)):
        ResidualFlow(on="features", **QUICK, learning_rate=1e30).fit(features(rng.normal(size=(300, 3))))


def test_whoever_watches_sees_each_epoch(rng):
    data = rng.normal(size=(20, 3))
    plan = training.Plan((3,), 1, 4, epochs=3, batch_size=10, learning_rate=1e-3, seed=0)
    seen = []
    _, losses = training.train_flow(
        plan, data, Scaling.learn(data), torch.device("cpu"), on_epoch=lambda n, losses, flow: seen.append((n, *losses))
    )
    assert seen == [(n, *losses[:n]) for n in (1, 2, 3)]

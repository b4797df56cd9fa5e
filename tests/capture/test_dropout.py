"""Dropout whose masks are hashes: against the reference generator, one unit at a time, and against what chance would do."""

import re
import threading

import numpy as np
import pytest

from terrafirma.capture import dropout as dropout_module
from terrafirma.capture.dropout import _mixed, _pick, kept_units
from terrafirma.capture.record import record
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from tests.onnx_nets import mlp as onnx_mlp

torch = pytest.importorskip("torch")
nn = torch.nn
HOOKS = torch.nn.modules.module


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


class SplitMix:
    """Steele, Lea and Flood's generator, word by word."""

    def __init__(self, seed):
        self.state = seed

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) % 2**64
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)


def naive_kept(p, *numbers):
    """Whether a unit is kept: each number picks an output of the generator that those before it seeded."""
    word = 0
    for number in numbers:
        generator = SplitMix(word)
        for _ in range(number + 1):
            word = generator.next()
    return word // 2 >= p * 2**63


def naive_mask(shape, p, seed, number, module, call, first=0):
    """Of a tensor with samples first: 0, or 1 / (1 - p)."""
    mask = torch.zeros(shape)
    for row in range(shape[0]):
        kept = [naive_kept(p, seed, number, module, call, first + row, unit) for unit in range(mask[row].numel())]
        mask[row] = torch.tensor(kept).reshape(shape[1:]) / (1 - p)
    return mask


def test_the_generator_is_the_published_one():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [_pick(1234567, i) for i in range(5)] == known
    generator = SplitMix(1234567)
    assert [generator.next() for _ in range(5)] == known


class Calls(nn.Module):
    """A module that runs a function of itself and x."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def masks(n=60, units=50, p=0.3, **more):
    """What dropout leaves of ones, 0 or 1: (passes, n, 3 * units) of two modules, the first of which runs twice."""

    def forward(self, x):
        x = x.relu()
        return torch.cat([self.a(x), self.b(x), self.a(x)], 1)

    net = Calls(forward, a=nn.Dropout(0.9), b=nn.Dropout(0.9))
    return record(net, np.ones((n, units), np.float32), dropout=p, **more).stochastic[p] * np.float32(1 - p)


def test_masks_are_those_of_the_slow_twin():
    got = masks(n=9, units=4, passes=3, seed=5, batch_size=4)
    sites = [[(0, 0), (1, 0), (0, 1)][i // 4] for i in range(12)]
    for number in range(3):
        for row in range(9):
            expected = [naive_kept(0.3, 5, number, *site, row, i % 4) for i, site in enumerate(sites)]
            np.testing.assert_allclose(got[number, row], expected, rtol=1e-6)


def test_a_network_with_dropout_is_one_that_multiplies_by_the_masks():
    parts = {
        "conv": nn.Conv2d(2, 3, 3),
        "norm": nn.BatchNorm2d(3),
        "channels": nn.Dropout2d(0.1),
        "units": nn.Dropout(0.0, inplace=True),
        "fc": nn.Linear(12, 4),
    }
    parts["norm"].running_mean.uniform_(-1, 1)

    def dropping(self, x):
        x = self.channels(self.norm(self.conv(x)).relu())
        return self.fc(self.units(x.flatten(1)))

    x = torch.randn(7, 2, 4, 4)
    rec = record(Calls(dropping, **parts).train(), x, dropout=[0.6, 0.25], passes=3, seed=11, batch_size=3)
    assert list(rec.stochastic) == [0.25, 0.6]
    eager = {name: part.eval() for name, part in parts.items()}
    with torch.no_grad():
        for p, several in rec.stochastic.items():
            assert several.shape == (3, 7, 4)
            assert several.dtype == np.float32
            for number in range(3):
                h = eager["norm"](eager["conv"](x)).relu()
                h = h * naive_mask((7, 3), p, 11, number, 0, 0)[:, :, None, None]
                h = h.flatten(1) * naive_mask((7, 12), p, 11, number, 1, 0)
                np.testing.assert_allclose(several[number], eager["fc"](h).numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (5, 6, 3)), (nn.Dropout2d, (5, 6, 3, 2)), (nn.Dropout3d, (5, 6, 3, 2, 2))]
)
def test_whole_channels_are_dropped(kind, shape):
    got = record(nn.Sequential(nn.ReLU(), kind()), np.ones(shape, np.float32), dropout=0.5, passes=20).stochastic[0.5]
    channels = got.reshape(20, 5, 6, -1)
    assert (channels == channels[..., :1]).all()
    assert set(np.unique(channels)) == {0, 2}
    assert 0.4 < (channels[..., 0] > 0).mean() < 0.6


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_never_change_a_mask(batch_size):
    whole = masks(passes=2, batch_size=1000)
    np.testing.assert_array_equal(masks(passes=2, batch_size=batch_size), whole)
    np.testing.assert_array_equal(masks(n=30, passes=2, batch_size=batch_size), whole[:, :30])


@pytest.mark.parametrize("batch_size", [1, 7])
def test_batches_never_change_what_a_network_gives(batch_size):
    net = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 30), nn.ReLU(), nn.Dropout()).double()
    x = torch.randn(20, 5).double()
    some, whole = (record(net, x, dropout=0.4, passes=4, batch_size=size).stochastic[0.4] for size in (batch_size, 64))
    assert whole.dtype == np.float64
    np.testing.assert_allclose(some, whole, rtol=1e-12, atol=1e-14)


def test_several_rows_for_each_sample_belong_to_it():
    """As the windows of an image: masks are again those of whole samples."""
    net = Calls(lambda self, x: self.drop(x.relu().reshape(-1, 5)).reshape(len(x), 15), drop=nn.Dropout())
    x = np.ones((8, 15), np.float32)
    plain = record(nn.Sequential(nn.ReLU(), nn.Dropout()), x, dropout=0.5).stochastic[0.5]
    np.testing.assert_array_equal(record(net, x, dropout=0.5, batch_size=3).stochastic[0.5], plain)


@pytest.mark.parametrize(("device", "most"), [("cpu", 1 << 15), ("meta", 1 << 24)])
def test_few_hashes_are_held_at_once(monkeypatch, device, most):
    """On a CPU, as few as torch starts no threads for: another's threads on the same cores would hold them up."""
    sizes = []

    def mixed(words):
        sizes.append(words.numel())
        return _mixed(words)

    monkeypatch.setattr(dropout_module, "_mixed", mixed)
    kept_units(5, range(most // 512), 1000, 0.5, device)
    assert most // 2 < max(sizes) <= most
    assert sum(sizes) == most // 512 * 1001


@pytest.mark.parametrize("at_once", [1, 70, 10_000])
def test_how_many_are_held_at_once_changes_nothing(monkeypatch, at_once):
    expected = kept_units(5, range(3, 40), 30, 0.5)
    monkeypatch.setattr(dropout_module, "AT_ONCE", at_once)
    assert torch.equal(kept_units(5, range(3, 40), 30, 0.5), expected)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_units_are_kept_as_often_as_they_should_be(p):
    kept = masks(n=200, units=100, p=p) > 0
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size)
    by_unit = kept.mean(axis=(0, 1))
    assert 0.8 < by_unit.var() / (p * (1 - p) / (10 * 200)) < 1.25


def test_passes_modules_calls_rows_units_and_seeds_are_independent():
    first, other = (masks(n=100, units=100, p=0.5, seed=seed).reshape(10, 100, 3, 100) > 0.25 for seed in (0, 1))
    pairs = {
        "pass": (first[1:], first[:-1]),
        "row": (first[:, 1:], first[:, :-1]),
        "module": (first[:, :, 0], first[:, :, 1]),
        "call": (first[:, :, 0], first[:, :, 2]),
        "unit": (first[..., 1:], first[..., :-1]),
        "pass and row": (first[1:, :-1], first[:-1, 1:]),
        "row and unit": (first[:, 1:, :, :-1], first[:, :-1, :, 1:]),
        "seed": (first, other),
    }
    for name, (a, b) in pairs.items():
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size), name


def test_what_is_dropped_at_a_probability_is_dropped_at_higher_ones():
    net = nn.Sequential(nn.ReLU(), nn.Dropout())
    several = record(net, np.ones((50, 20), np.float32), dropout=np.array([0.2, 0.7])).stochastic
    assert ((several[0.2] == 0) <= (several[0.7] == 0)).all()
    assert (several[0.2] == 0).mean() < 0.3 < (several[0.7] == 0).mean()


def test_the_rest_of_a_recording_is_as_without_dropout():
    net, x = nn.Sequential(nn.Linear(5, 30), nn.ReLU(), nn.Dropout(), nn.Linear(30, 3)), torch.randn(20, 5)
    bare, rec = record(net, x, features=True), record(net, x, features=True, dropout=0.5, passes=2, batch_size=20)
    np.testing.assert_array_equal(rec.patterns.words, bare.patterns.words)
    np.testing.assert_array_equal(rec.features, bare.features)
    np.testing.assert_array_equal(rec.outputs, bare.outputs)
    assert bare.stochastic == {}
    assert repr(rec).endswith("features; 2 passes with dropout 0.5; head>")


def test_dropout_in_place_changes_what_was_handed_in():
    def forward(self, x):
        x = x.relu()
        self.a(x)
        self.b(input=x)
        return x

    def returning(self, x):
        return self.b(self.a(x.relu()))

    x = torch.rand(9, 5, 3)
    several = [
        record(Calls(run, a=nn.Dropout(inplace=True), b=nn.Dropout1d(inplace=True)), x, dropout=0.4).stochastic[0.4]
        for run in (forward, returning)
    ]
    assert (several[0] == 0).any()
    np.testing.assert_array_equal(*several)


def test_networks_that_squeeze_and_batches_of_any_size():
    net = Calls(lambda self, x: self.fc(self.drop(self.c(x).relu().mean((2, 3), keepdim=True).squeeze())))
    net.c, net.fc, net.drop = nn.Conv2d(1, 5, 2), nn.Linear(5, 2), nn.Dropout()
    x = torch.randn(7, 1, 3, 3)
    whole = record(net, x, dropout=0.5).stochastic[0.5]
    for size in (2, 3):
        some = record(net, x[:6], dropout=0.5, batch_size=size).stochastic[0.5]
        np.testing.assert_allclose(some, whole[:, :6], atol=1e-6)


def test_half_precision_is_no_other_sample():
    net = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), nn.Flatten(), nn.Linear(80, 3))
    for precision in (torch.bfloat16, torch.float16):
        assert record(net.to(precision), torch.randn(9, 5, 16), dropout=0.5).stochastic[0.5].shape == (10, 9, 3)


def test_encoders_drop_although_they_have_a_fast_path():
    net = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Flatten()).eval()
    several = record(net, torch.randn(4, 3, 8), dropout=0.5, passes=3).stochastic[0.5]
    assert np.ptp(several, axis=0).min() > 1e-6
    assert torch.backends.mha.get_fastpath_enabled()


def test_compiled_parts_drop():
    inner = torch.compile(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout()), backend="eager")
    several = record(nn.Sequential(inner, nn.Linear(6, 3)), torch.randn(4, 4), dropout=0.5, passes=3).stochastic[0.5]
    assert np.ptp(several, axis=0).min() > 1e-6


def traces(module):
    """All that dropout might leave behind."""
    hooks = [HOOKS._global_forward_hooks, HOOKS._global_forward_pre_hooks]
    hooks += [part._forward_hooks for part in module.modules()]
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return (
        [len(kind) for kind in hooks],
        [part.training for part in module.modules()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        {name: value.tolist() for name, value in state.items()},
    )


def test_nothing_is_left_behind():
    hooked = []

    def forward(self, x):
        hooked.append(len(self.drop._forward_hooks))
        if self.broken and len(hooked) > 3:
            raise KeyError("broken")
        return self.drop(self.norm(x).relu())

    net = Calls(forward, norm=nn.BatchNorm1d(5), drop=nn.Dropout(), broken=False).train()
    net.norm.eval()
    x = torch.randn(20, 5)
    before = traces(net)
    given = x.clone()
    record(net, x, dropout=[0.5, 0.2], passes=2, batch_size=10)
    assert traces(net) == before
    assert hooked == [0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1]  # two more for the first samples alone
    assert torch.equal(x, given)
    hooked.clear()
    net.broken = True
    with pytest.raises(KeyError, match="broken"):
        record(net, x, dropout=0.5)
    assert traces(net) == before


def test_calls_of_other_threads_are_left_alone():
    def forward(self, x):
        found = []
        thread = threading.Thread(target=lambda: found.append(self.drop(x)))
        thread.start()
        thread.join()
        assert torch.equal(found[0], x)
        return self.drop(x.relu())

    several = record(Calls(forward, drop=nn.Dropout()), torch.ones(5, 6), dropout=0.5).stochastic[0.5]
    assert (several == 0).any()


NONE = "which has none (F.dropout and what runs inside TorchScript are not seen); choose a score that needs no dropout."
COME_FIRST = "let samples come first (batch_first=True), or choose a score that needs no dropout."


class AlwaysOn(nn.Dropout):
    def forward(self, x):
        return nn.functional.dropout(x, self.p, training=True)


class Named(nn.Dropout):
    """One of the user's own that does as torch's."""


def test_subclasses_drop_as_what_they_are_of():
    x = np.ones((8, 15), np.float32)
    plain = record(nn.Sequential(nn.ReLU(), nn.Dropout()), x, dropout=0.5).stochastic[0.5]
    np.testing.assert_array_equal(record(nn.Sequential(nn.ReLU(), Named()), x, dropout=0.5).stochastic[0.5], plain)


def others(shape, n, fewer):
    return (
        f"Dropout must be where samples come first. Got a tensor of shape {shape} for {n} samples, of which the first rows are "
        f"others than those of {n - 1} alone, of shape {fewer}; {COME_FIRST}"
    )


class TestRefused:
    @pytest.mark.parametrize(("n", "tokens"), [(2, 2), (2, 4), (3, 3), (8, 8), (8, 16)])
    def test_samples_second(self, n, tokens):
        drop = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Dropout())
        net = Calls(lambda self, x: self.drop(x.transpose(0, 1))[0].relu(), drop=drop)  # of the first token
        x, some = torch.randn(n, tokens, 3), min(n, 3)
        with pytest.raises(InvalidInput, match=f"^{re.escape(others((tokens, some, 5), some, (tokens, some - 1, 5)))}"):
            record(net, x, dropout=0.1, passes=2)
        record(net, x[:1], dropout=0.1)  # nothing to compare

    def test_samples_among_others(self):
        net = Calls(lambda self, x: self.drop(torch.cat([x, -x]))[: len(x)].relu(), drop=nn.Dropout())
        with pytest.raises(InvalidInput, match=f"^{re.escape(others((6, 5), 3, (4, 5)))}"):
            record(net, torch.randn(8, 5), dropout=0.5)

    @pytest.mark.parametrize(
        ("net", "message"),
        [
            (
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
                f"dropout needs a network with nn.Dropout modules. Got Sequential, {NONE}",
            ),
            (
                nn.Sequential(nn.ReLU(), nn.AlphaDropout()),
                (
                    "dropout needs nn.Dropout, Dropout1d, Dropout2d or Dropout3d. Got AlphaDropout at '1', which puts other "
                    "values than 0; choose a score that needs no dropout."
                ),
            ),
            (
                nn.Sequential(nn.ReLU(), AlwaysOn()),
                (
                    "dropout needs nn.Dropout modules that are torch's own. Got AlwaysOn at '1', whose forward is another and "
                    "may drop by itself; put nn.Dropout there."
                ),
            ),
            (
                Calls(lambda self, x: x.relu(), drop=nn.Dropout()),
                (
                    "dropout needs nn.Dropout modules that run. None of the network's did; choose a score that needs no "
                    "dropout."
                ),
            ),
            (
                Calls(lambda self, x: self.drop(x.relu().T[:3]).T @ torch.ones(3, 2), drop=nn.Dropout()),
                (f"Dropout must be where samples come first. Got a tensor of shape (3, 5) for 5 samples; {COME_FIRST}"),
            ),
        ],
        ids=["none", "alpha", "always on", "does not run", "samples second"],
    )
    def test_networks(self, net, message):
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}"):  # a note may follow
            record(net, torch.randn(5, 4), dropout=0.5)

    def test_networks_that_are_not_of_torch(self, rng):
        from sklearn.neural_network import MLPRegressor

        x = rng.normal(size=(20, 4)).astype(np.float32)
        fitted = MLPRegressor(hidden_layer_sizes=(8,), solver="lbfgs", max_iter=1000, tol=1.0).fit(x, x[:, 0])
        message = (
            "dropout needs a torch module with nn.Dropout modules. Got MLPRegressor of scikit-learn, which has none; "
            "choose a score that needs no dropout."
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(fitted, x, dropout=0.5)
        message = (
            "dropout needs a torch module with nn.Dropout modules. Got the ONNX file onnx, whose dropout does nothing; hand "
            "in the module, or choose a score that needs no dropout."
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(onnx_mlp(rng), x, dropout=0.5)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"dropout": 1.0}, "dropout must lie between 0 and 1 (probabilities that a unit is dropped). Got 1.0."),
            ({"dropout": (0.5, 0)}, "dropout must lie between 0 and 1 (probabilities that a unit is dropped). Got 0."),
            ({"dropout": None}, "dropout must lie between 0 and 1 (probabilities that a unit is dropped). Got None."),
            ({"dropout": 0.5, "passes": 1}, "passes must be an integer of at least 2. Got 1."),
            ({"dropout": 0.5, "seed": -1}, "seed must be an integer of at least 0. Got -1."),
        ],
    )
    def test_arguments(self, arguments, message):
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(nn.Sequential(nn.ReLU(), nn.Dropout()), torch.randn(5, 4), **arguments)

    def test_outputs_that_are_no_numbers(self):
        net = Calls(lambda self, x: self.drop(x.relu()) / self.drop(x.relu()), drop=nn.Dropout())
        message = (
            "The network's outputs with dropout 0.9 must be numbers. Got NaN in row 0 (5 of 5 rows); look for NaN in the "
            "inputs or an overflow in the network."
        )
        with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
            record(net, torch.ones(5, 4), dropout=0.9)


def test_outputs_with_dropout_have_an_axis_of_passes():
    message = "stochastic must hold arrays of shape (passes, n, C). Got (4, 5) at probability 0.5; stack passes."
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        Recorded(labels=np.zeros(5, int), stochastic={0.5: np.zeros((4, 5))})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_masks_on_a_device_are_those_of_the_cpu():
    net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Dropout(), nn.Dropout1d())
    with torch.no_grad():
        net[0].weight.fill_(0)
        net[0].bias.fill_(1)
    x = np.ones((300, 40), np.float32)
    on_cpu = record(net, x, dropout=[0.1, 0.6], seed=2**63).stochastic
    on_gpu = record(net.cuda(), x, dropout=[0.1, 0.6], seed=2**63).stochastic
    for p, expected in on_cpu.items():
        np.testing.assert_array_equal(on_gpu[p] == 0, expected == 0)
        np.testing.assert_allclose(on_gpu[p], expected, rtol=1e-6)

"""Guards with other scores than the subfunction bound: recorded for, promised, saved, served."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from terrafirma import Guard, record, scores
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.guard.state import Wanted
from terrafirma.scores.base import Score
from terrafirma.scores.subfunction import SubfunctionBound

pytestmark = pytest.mark.jit
NAMES = [name for name in scores.available() if not name.startswith("ensemble_")]
QUICK = {"residual_flow": {"on": "features", "epochs": 2, "blocks": 2, "width": 16}}


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X, y = torch.tensor(X / 16).float(), torch.tensor(y)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
    parts = order.split([400, 800, 597])
    return [(X[rows], y[rows]) for rows in parts]


@pytest.fixture(scope="module")
def net(digits):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 10))
    X, y = digits[0]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        for rows in torch.randperm(len(X)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[rows]), y[rows]).backward()
            optimizer.step()
    return net.eval()


def guard_by(name, net, digits, **parameters):
    train, validation, _ = digits
    score = scores.get(name, **QUICK.get(name, {}), **parameters)
    return Guard(net, score).fit(train, validation, risk=0.3, verbose=False)


@pytest.mark.parametrize("name", NAMES)
def test_any_score_makes_a_guard_that_can_be_saved_and_served(net, digits, name, tmp_path):
    guard = guard_by(name, net, digits)
    X, _ = digits[2]
    verdict = guard.predict(X)
    assert np.isfinite(verdict.unreliability.numpy()).all()
    assert verdict.accepted.any()
    guard.save(tmp_path / "guard")
    loaded = Guard.load(tmp_path / "guard", net)
    for part in ("prediction", "unreliability", "accepted", "error_probability"):
        assert torch.equal(getattr(loaded.predict(X), part), getattr(verdict, part))
    assert loaded.summary() == guard.summary()
    served = guard.wrap()(X[:9])
    assert torch.allclose(served.unreliability, verdict.unreliability[:9], rtol=1e-3)  # torch rounds by batch
    again = loaded.recalibrate(risk=0.3).predict(X)
    assert torch.equal(again.accepted, verdict.accepted)


@pytest.mark.parametrize("name", ["odin", "class_distance"])
def test_scores_that_follow_gradients_get_the_network_back(net, digits, name, tmp_path):
    guard = guard_by(name, net, digits, model=net, epsilon=0.01)
    X, _ = digits[2]
    plain = guard_by(name, net, digits).unreliability(X)
    u = guard.unreliability(X)
    assert not np.allclose(u, plain)
    guard.save(tmp_path / "guard")
    assert np.array_equal(Guard.load(tmp_path / "guard", net).unreliability(X), u)
    message = "must be given its network, of which its score takes gradients. Load it with model=."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Guard.load(tmp_path / "guard")


def test_a_name_is_enough(net, digits):
    train, validation, test = digits
    guard = Guard(net, "entropy").fit(train, validation, risk=0.1, verbose=False)
    assert guard.state.score.name == "entropy"
    assert "score        <score entropy fitted>\n" in guard.summary()
    chosen = Guard(net, "knn").fit(train, validation, risk=0.1, verbose=False).summary()
    assert ">: on 400 samples (half of validation), AUCEA 0.9" in chosen
    assert guard.evaluate(test).auroc > 0.7
    with pytest.raises(InvalidInput, match=re.escape("This needs the subfunction bound. Got a guard with Entropy;")):
        guard.explain(test[0][:1])


def test_the_subfunction_bound_by_name_is_the_guards_own(net, digits):
    train, validation, test = digits
    named, own = (Guard(net, s).fit(train, validation, risk=0.1, verbose=False) for s in ("subfunction", None))
    assert isinstance(named.state.score, SubfunctionBound)
    assert np.array_equal(named.unreliability(test[0]), own.unreliability(test[0]))
    fixed = Guard(net, scores.get("subfunction", rho=5.0, delta=0.1))
    assert (fixed.score.rho, fixed.score.delta) == (5.0, 0.1)


def test_passes_are_made_of_what_is_used_alone(net, digits):
    """None for training, five probabilities to choose from on validation data, then the chosen one alone."""
    seen = []
    counting = net.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    train, validation, test = (tuple(part[:100] for part in some) for some in digits)
    guard = Guard(net, "mc_dropout").fit(train, validation, test, risk=0.5, verbose=False)
    fitting, seen[:] = len(seen), []
    guard.predict(test[0])
    counting.remove()
    assert fitting == 1 + (1 + 5 * 10 + 2) + (1 + 10 + 2)  # two more each see to it that samples come first
    assert len(seen) == 1 + 10 + 2


def test_what_cannot_be_chosen_takes_no_validation_data(net, digits):
    """All of it calibrates, instead of a half."""
    train, validation, _ = digits
    for score, n in (("entropy", 800), (scores.get("knn", k=3), 800), ("knn", 400), ("temperature", 400)):
        guard = Guard(net, score).fit(train, validation, risk=0.3, verbose=False)
        assert len(guard.state.calibration) == n


def test_a_guard_keeps_what_calibration_needs_and_copies_it(net, digits):
    train, validation, test = (record(net, data, features=True, dropout=(0.1, 0.5)) for data in digits)
    guard = Guard(None, "mc_dropout").fit(train, validation, test, risk=0.3, verbose=False)
    kept, p = guard.state.calibration, guard.state.score.p_
    assert kept.outputs is None
    assert kept.features is None
    assert list(kept.stochastic) == [p]
    threshold = guard.policy.threshold
    test.stochastic[p][:], test.errors[:] = 0, 1
    assert guard.recalibrate().policy.threshold == threshold


def test_scores_that_are_given_stay_as_they_were(net, digits):
    train, validation, _ = digits
    mine = scores.get("knn")
    guard = Guard(net, mine).fit(train, validation, risk=0.3, verbose=False)
    assert vars(mine) == {"k": None}
    assert guard.score is mine


def test_a_loaded_guard_can_be_fitted_again(net, digits, tmp_path):
    train, validation, _ = digits
    Guard(net, "knn").fit(train, validation, risk=0.3, verbose=False).save(tmp_path / "guard")
    loaded = Guard.load(tmp_path / "guard", net)
    assert vars(loaded.score) == {"k": None}
    assert loaded.fit(validation, train, risk=0.3, verbose=False).state.samples.seen == 800


def test_training_inputs_are_kept_for_those_who_learn_from_them(net, digits):
    of = {name: Wanted.by(s, None, "none").to_train(s).inputs for name, s in gradient_scores(net).items()}
    assert of == {"odin": False, "class_distance": False, "as published": True, "residual_flow": True}


def gradient_scores(net):
    return {
        "odin": scores.get("odin", model=net),
        "class_distance": scores.get("class_distance", model=net),
        "as published": scores.get("class_distance", model=net, variant="published"),
        "residual_flow": scores.get("residual_flow"),
    }


def test_half_a_bound_is_still_one_that_explains(net, digits):
    train, validation, test = digits
    guard = Guard(net, scores.get("subfunction", rho=4.0)).fit(train, validation, risk=0.3, verbose=False)
    assert guard.state.bound.rho == 4.0
    assert len(guard.explain(test[0][:2])) == 2


def test_a_registered_score_is_saved_by_its_name(net, digits, tmp_path):
    class Norm(Score):
        """Small features are unreliable."""

        name = "norm"
        needs = frozenset({"features"})

        def score(self, recorded):
            return -np.linalg.norm(recorded.features, axis=1)

    train, validation, test = digits
    guard = Guard(net, Norm()).fit(train, validation, risk=0.1, verbose=False)
    guard.save(tmp_path / "guard")
    message = "The score 'norm' is not known here. Import what registers it, then load again."
    with pytest.raises(BadFile, match=re.escape(message)):
        Guard.load(tmp_path / "guard", net)
    scores.register(Norm)
    try:
        loaded = Guard.load(tmp_path / "guard", net)
    finally:
        del scores.OWN["norm"]
    assert np.array_equal(loaded.unreliability(test[0]), guard.unreliability(test[0]))


def test_a_score_that_is_no_score_of_the_library_is_not_saved(net, digits, tmp_path):
    class Mine:
        def fit(self, train, validation):
            pass

        def unreliability(self, recorded):
            return -recorded.outputs.max(axis=1)

    train, validation, _ = digits
    guard = Guard(net, Mine()).fit(train, validation, risk=0.1, verbose=False)
    message = (
        "A guard that is saved must have a score of terrafirma's, or a registered one. Got Mine; "
        "make it a subclass of terrafirma.scores.Score and register it."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        guard.save(tmp_path / "guard")
    assert not (tmp_path / "guard").exists()


def test_an_ensemble_is_no_score_of_one_network(net):
    message = "A guard must have a score of one network. Got ensemble_variance; average the networks' outputs."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        Guard(net, "ensemble_variance")

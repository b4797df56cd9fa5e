import csv
import io
import re
from dataclasses import replace

import numpy as np
import pytest

from terrafirma import Guard, Recorded, compare, metrics, scores
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Source
from terrafirma.scores.base import Score


@pytest.fixture
def sets(rng):
    """A network's train, validation, test, and two sets that it does not know."""

    def draw(n, shift=0.0):
        features = np.abs(rng.normal(size=(n, 8))) + shift
        outputs = features @ W
        labels = (outputs + rng.normal(size=outputs.shape)).argmax(axis=1)
        return Recorded(outputs=outputs, features=features, labels=labels, patterns=features > 0.5)

    W = rng.normal(size=(8, 3))
    return draw(300), draw(200), draw(250), {"near": draw(100, 0.5), "far": draw(120, 3.0)}


@pytest.fixture
def found(sets):
    return compare({"net": sets}, ["entropy", "energy", "subfunction"], draws=30)


def test_every_figure_is_that_of_metrics(sets, found):
    train, validation, test, ood = sets
    for name in ("entropy", "energy", "subfunction"):
        score = scores.get(name).fit(train, validation)
        u, novel = score.unreliability(test), score.unreliability(ood["far"])
        both, is_novel = np.concatenate([u, novel]), np.repeat([False, True], [250, 120])
        assert found.value(name) == pytest.approx(metrics.auroc(u, test.errors == 1))
        assert found.value(name, metric="aucea") == pytest.approx(metrics.aucea(u, test.errors))
        assert found.value(name, metric="fpr95") == pytest.approx(metrics.fpr_at_tpr(u, test.errors == 1))
        assert found.value(name, "far") == pytest.approx(metrics.auroc(both, is_novel))
        assert found.value(name, "far", "aurc", "net") == pytest.approx(metrics.aurc(both, is_novel))


def test_intervals_hold_their_value_and_repeat(sets, found):
    for row in found.results:
        assert row.interval.low <= row.interval.value <= row.interval.high
    assert compare({"net": sets}, ["entropy", "energy", "subfunction"], draws=30).results == found.results
    other = compare({"net": sets}, ["entropy"], draws=30, seed=1)
    assert other.results[0].interval.low != found.results[0].interval.low


def test_the_best_are_bold(found):
    table = found.table()
    wrong = int(found.counts["net", "misclassified"][0])
    assert [row[1] for row in table.rows[::3]] == [
        f"misclassified: {wrong} of 250",
        "near: 100 of 350",
        "far: 120 of 370",
    ]
    for data, first in (("misclassified", 0), ("near", 3), ("far", 6)):
        for j, metric in enumerate(("auroc", "aucea", "fpr95", "aurc")):
            names = ("entropy", "energy", "subfunction")
            values = [found.value(name, data, metric) for name in names]
            best = (max if metric in ("auroc", "aucea") else min)(values)
            bold = [i for i, _ in enumerate(names) if (first + i, 3 + j) in table.bold]
            assert bold == [i for i, value in enumerate(values) if value == best]
            assert found.best(data, metric) == names[values.index(best)]


def test_it_can_be_carried_away(found):
    rows = list(csv.DictReader(io.StringIO(found.to_csv())))
    assert len(rows) == 3 * 3 * 4
    assert float(rows[0]["value"]) == found.value("entropy")
    assert float(rows[0]["low"]) == found.results[0].interval.low
    assert found.to_markdown().startswith("| network | data | score | AUROC | AUCEA | FPR95 | AURC |\n| --- |")
    assert r"\textbf{" in found.to_latex()
    assert "<b>" in found._repr_html_()
    assert str(found).splitlines()[0].split() == ["network", "data", "score", "AUROC", "AUCEA", "FPR95", "AURC"]


def test_by_default_all_that_can_be_computed(sets):
    found = compare({"net": sets}, draws=5)
    names = {row.score for row in found.results}
    assert {"entropy", "knn", "mahalanobis", "subfunction", "vim"} <= names
    left_out = {score: why for (_, score), why in found.left_out.items()}
    assert left_out.keys() == {"mc_dropout", "residual_flow", *(n for n in scores.available() if "ensemble_" in n)}
    assert names.isdisjoint(left_out)
    assert left_out["mc_dropout"] == (
        "The score mc_dropout needs stochastic, which were not recorded. Record again with dropout=0.5, or several."
    )
    assert left_out["residual_flow"] == "It trains a network of its own. Name it, to have it computed."
    assert left_out["ensemble_variance"] == (
        "Ensemble scores must have several networks, recorded on the same samples. Got one; leave these scores out."
    )
    for text in (str(found), found.to_markdown(), found.to_latex(), found._repr_html_()):
        assert "left out: mc_dropout (net): The score mc_dropout needs stochastic" in text


def test_what_is_asked_for_and_lacking_is_an_error(sets):
    with pytest.raises(InvalidInput, match="The score mc_dropout needs stochastic, which were not recorded"):
        compare({"net": sets}, ["entropy", "mc_dropout"])


def test_scores_with_hyperparameters_go_by_them(sets):
    found = compare({"net": sets}, ["entropy", scores.get("energy", react=0.8)], draws=5)
    assert [row.score for row in found.results[:24:12]] == ["entropy", "energy(react=0.8)"]
    named = compare({"net": sets}, {"mine": scores.get("energy", react=0.8)}, draws=5)
    assert named.value("mine") == found.value("energy(react=0.8)")
    assert compare({"net": sets}, ["knn"], draws=5).settings["net", "knn"].keys() == {"k"}


def test_scores_that_are_given_stay_as_they_were(sets):
    mine = scores.get("knn")
    compare({"net": sets}, [mine], draws=5)
    assert vars(mine) == {"k": None}


def test_ensembles_take_all_networks_together(sets, rng):
    train, validation, test, ood = sets

    def noisy(one):
        return Recorded(
            outputs=one.outputs + rng.normal(size=one.outputs.shape), labels=one.labels, patterns=one.patterns
        )

    other = noisy(train), noisy(validation), noisy(test), {name: noisy(one) for name, one in ood.items()}
    found = compare({"a": sets, "b": other}, ["entropy", "ensemble_max_response"], draws=5)
    assert {row.network for row in found.results} == {"a", "b", "all 2"}
    pair = [test, other[2]]
    u = scores.get("ensemble_max_response").fit([train, other[0]]).unreliability(pair)
    mean = np.mean([np.exp(one.outputs) / np.exp(one.outputs).sum(axis=1, keepdims=True) for one in pair], axis=0)
    wrong = mean.argmax(axis=1) != test.labels
    assert found.value("ensemble_max_response", network="all 2") == pytest.approx(metrics.auroc(u, wrong))
    with pytest.raises(InvalidInput, match=re.escape("score, data, metric and network must name one figure")):
        found.value("entropy")


def test_guards_need_the_test_set_alone(sets):
    train, validation, test, ood = sets
    guard = Guard(None).fit(train, validation, risk=0.3, verbose=False)
    found = compare({"net": (None, None, test, ood)}, [], {"mine": guard}, draws=5)
    assert found.value("mine") == pytest.approx(metrics.auroc(guard.unreliability(test), test.errors == 1))
    assert found.left_out == {}
    both = compare({"net": sets}, ["entropy"], {"mine": guard}, draws=5)
    assert [row.score for row in both.results[:24:12]] == ["entropy", "mine"]
    message = "networks must have training data for scores to learn from. Got None; for guards alone use scores=[]."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        compare({"net": (None, None, test, ood)}, ["entropy"])


def test_what_fails_for_one_network_is_computed_for_the_other(sets):
    train, validation, test, _ = sets
    bare = [Recorded(outputs=one.outputs, labels=one.labels) for one in (train, validation, test)]
    found = compare({"a": sets, "b": bare}, draws=5)
    assert ("b", "knn") in found.left_out
    assert ("a", "knn") not in found.left_out
    assert ("all 2", "ensemble_variance") in found.left_out  # their other sets differ
    assert found.value("knn", network="a") > 0


@pytest.mark.parametrize("kind", ["regressions", "no outputs", "other classes"])
def test_networks_that_are_no_ensemble_are_compared_without_one(rng, kind):
    def draw(n, classes):
        outputs = rng.normal(size=n if kind == "regressions" else (n, classes))
        more = {} if kind == "no outputs" else {"outputs": outputs}
        return Recorded(patterns=rng.random((n, 16)) < 0.3, errors=rng.random(n) < 0.3, labels=np.zeros(n, int), **more)

    networks = {name: [draw(60, classes) for _ in range(3)] for name, classes in (("a", 4), ("b", 5))}
    found = compare(networks, draws=5)
    assert found.value("subfunction", network="b") > 0
    assert ("all 2", "ensemble_variance") in found.left_out


def test_a_bug_in_a_score_of_ones_own_names_it(sets):
    class Broken(Score):
        name = "broken"

        def score(self, recorded):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        compare({"net": sets}, [Broken()])
    assert caught.value.__notes__ == ["This came up while the score broken was computed for net."]


def sourced(one, model="m", data="d"):
    return replace(one, source=Source("Net", model, data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"validation": {"model": "other"}},
            (
                "networks['net'] must hold recordings of one network. Got another, or other weights, for validation; record "
                "all sets with the same."
            ),
        ),
        (
            {"far": {"model": "other"}},
            "networks['net'] must hold recordings of one network. Got another, or other weights, for far; record all",
        ),
        (
            {"near": {"data": "far"}},
            "networks['net'] must hold other samples in every set. Got the same for near and far; hold some out.",
        ),
    ],
)
def test_recordings_that_know_where_they_are_from_must_fit(sets, change, message):
    """Of one network, and of other samples each."""
    train, validation, test, ood = sets
    ood = {"near": ood["near"], "far": ood["near"]}  # as many
    roles = {"train": train, "validation": validation, "test": test, **ood}
    made = {role: sourced(one, **{"data": role} | change.get(role, {})) for role, one in roles.items()}
    with pytest.raises(InvalidInput, match=re.escape(message)):
        compare({"net": (made["train"], made["validation"], made["test"], {n: made[n] for n in ood})}, ["entropy"])


def test_recordings_of_other_layers_are_refused(sets):
    a, b = (replace(sets[i], layer_names=(name,)) for i, name in ((0, "a"), (1, "b")))
    message = (
        "networks['net'] must hold recordings of the same layers. Got b for validation, and a before; record all alike."
    )
    with pytest.raises(InvalidInput, match=re.escape(message)):
        compare({"net": (a, b, sets[2])}, ["entropy"])


def test_the_best_of_several_networks_is_asked_of_each(sets):
    found = compare({"a": sets, "b": sets}, ["entropy", "energy"], draws=5)
    with pytest.raises(InvalidInput, match=re.escape("network must be one of a, b. Got none;")):
        found.best()
    assert found.best(network="a") == found.best(network="b")
    with pytest.raises(
        InvalidInput, match=re.escape("there are data ['misclassified', 'near', 'far'], metrics ['auroc',")
    ):
        found.best("svhn")


def test_regressions_have_no_roc(rng):
    """Errors between 0 and 1: AUROC and FPR are not defined."""
    recorded = Recorded(patterns=rng.random((90, 16)) < 0.3, errors=rng.random(90), outputs=rng.normal(size=90))
    found = compare({"net": (recorded[:30], recorded[30:60], recorded[60:])}, ["subfunction"], draws=5)
    assert found.table().rows[0][3] == "-"
    assert 0 < found.value("subfunction", metric="aurc") < 1
    assert found.to_csv().splitlines()[1] == "net,subfunction,misclassified,auroc,,,"
    with pytest.raises(InvalidInput, match="must name figures that are defined"):
        found.best()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: ({}, None),
            "networks must be a dict of at least one network. Got none; give {'name': (train, validation, test)}.",
        ),
        (
            lambda s: ({"net": s[:2]}, None),
            (
                "networks['net'] must be (train, validation, test), and a dict of out-of-distribution sets where there are "
                "any. Got Recorded, Recorded."
            ),
        ),
        (
            lambda s: ({"net": (*s[:2], s[2].outputs)}, None),
            "networks['net'] must hold recordings. Got ndarray for test; make them with terrafirma.record.",
        ),
        (
            lambda s: ({"net": (*s[:3], {"misclassified": s[2]})}, None),
            "An out-of-distribution set must not be called 'misclassified'. Got one; rename it.",
        ),
        (
            lambda s: ({"net": s}, "entropy"),
            (
                "scores must be a list of names or scores, or a dict of them by name, and guards a dict of fitted guards. "
                "Got 'entropy'."
            ),
        ),
        (
            lambda s: ({"net": s}, ["entropy"] * 2),
            "scores and guards must differ. Got 'entropy' twice; name them, {'one': ..., 'other': ...}.",
        ),
        (
            lambda s: ({"net": s}, ["ensemble_variance"]),
            "Ensemble scores must have several networks, recorded on the same samples. Got one; leave these scores out.",
        ),
        (
            lambda s: ({"a": s, "b": (s[0], s[1], s[2][1:])}, ["ensemble_variance"]),
            "recorded on the same samples. Got 2 with differing test sets; leave these scores out.",
        ),
        (lambda s: (s, None), "networks must be a dict of at least one network. Got tuple; give "),
        (lambda s: ({"net": s}, []), "scores must name at least one score, where there are no guards. Got none."),
        (
            lambda s: ({"net": (*s[:2], s[2][:0])}, ["entropy"]),
            "networks['net'] must hold samples in every set. Got none in test.",
        ),
    ],
)
def test_bad_input_is_named(sets, change, message):
    networks, chosen = change(sets)
    with pytest.raises(InvalidInput, match=re.escape(message)):
        compare(networks, chosen)


def test_a_seed_is_a_number(sets):
    with pytest.raises(InvalidInput, match=re.escape("seed must be an integer of at least 0. Got None.")):
        compare({"net": sets}, ["entropy"], seed=None)

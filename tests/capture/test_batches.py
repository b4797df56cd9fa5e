import re

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from terrafirma.capture.batches import DataHash, batches
from terrafirma.errors import InvalidInput

X, Y = np.arange(20.0).reshape(10, 2), np.arange(10)


def all_of(data, batch_size=4):
    """Inputs and labels of all batches, joined, and the numbers of rows."""
    got = list(batches(data, batch_size))
    inputs = np.concatenate([np.asarray(batch.inputs) for batch in got])
    labels = None if got[0].labels is None else np.concatenate([batch.labels for batch in got])
    return inputs, labels, [batch.n for batch in got]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (torch.tensor(X), torch.tensor(Y)),
        (X, Y.tolist()),
        [(X[:4], Y[:4]), (X[4:8], Y[4:8]), (X[8:], Y[8:])],
        [[X[:4], Y[:4]], [X[4:8], Y[4:8]], [X[8:], Y[8:]]],
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=4),
        DataLoader(TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=4, shuffle=True, drop_last=True),
        DataLoader(
            TensorDataset(torch.tensor(X), torch.tensor(Y)), batch_size=4, sampler=WeightedRandomSampler([1.0] * 10, 10)
        ),
    ],
    ids=["arrays", "tensors", "list of labels", "tuples", "lists", "dataset", "loader", "shuffling", "weighted"],
)
def test_every_form_gives_the_same_batches_in_order(data):
    inputs, labels, sizes = all_of(data)
    assert np.array_equal(inputs, X)
    assert np.array_equal(labels, Y)
    assert sizes == [4, 4, 2]


def test_a_loader_of_a_random_subset_is_read_in_order():
    loader = DataLoader(TensorDataset(torch.tensor(X)), batch_size=4, sampler=SubsetRandomSampler([7, 1, 4]))
    inputs, labels, _ = all_of(loader)
    assert np.array_equal(inputs, X[[1, 4, 7]])
    assert labels is None
    assert batches(loader, 4).n_samples == 3


def test_sizes_are_known_beforehand_where_they_can_be():
    dataset = TensorDataset(torch.tensor(X))
    assert batches(X, 4).n_samples == 10
    assert batches(DataLoader(dataset, batch_size=4), 4).n_samples == 10
    assert batches(DataLoader(dataset, batch_size=4, drop_last=True), 4).n_samples is None
    assert batches(iter([X]), 4).n_samples is None


@pytest.mark.parametrize("key", ["labels", "label", "target", "targets", "y"])
def test_dicts_hold_labels_under_a_usual_name(key):
    for data in ({"a": X, key: Y, "b": X}, [{"a": X, key: Y, "b": X}]):
        (batch,) = batches(data, 100)
        assert batch.inputs.keys() == {"a", "b"}
        assert np.array_equal(batch.labels, Y)
    first, *_ = batches({"a": X, key: Y}, 3)
    assert np.array_equal(first.inputs["a"], X[:3])
    assert np.array_equal(first.labels, Y[:3])


def test_an_array_alone_has_no_labels():
    inputs, labels, sizes = all_of(X)
    assert np.array_equal(inputs, X)
    assert labels is None
    assert sizes == [4, 4, 2]


def test_batches_of_arrays_can_be_read_twice():
    stream = batches((X, Y), 4)
    assert [batch.n for batch in stream] == [batch.n for batch in stream] == [4, 4, 2]


FORMS = "an array, (X, y), a dict of arrays, or a loader that yields (inputs, labels), dicts or arrays"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("train", f"data must be {FORMS}. Got 'train'."),
        (None, f"data must be {FORMS}. Got None."),
        (3, f"data must be {FORMS}. Got int."),
        ([["a", "b"]], f"batch 0 must be {FORMS}. Got inputs of type str."),
        (
            [(X, Y, Y)],
            (
                "batch 0 must be (inputs, labels). Got 3 parts; make arrays of lists, and put several inputs into a dict or "
                "tuple of their own."
            ),
        ),
        ((X, Y[:9]), "labels of data must have one row for each of its 10 samples. Got shape (9,); pair them anew."),
        (
            [(X, Y), (X, 3)],
            "labels of batch 1 must have one row for each of its 10 samples. Got shape (); pair them anew.",
        ),
        ({"a": X, "b": X[:3]}, "All inputs of data must have as many rows. Got 10, 3."),
    ],
)
def test_anything_else_is_refused(data, message):
    with pytest.raises(InvalidInput, match=f"^{re.escape(message)}$"):
        list(batches(data, 4))


def fingerprint(data, batch_size=4):
    seen = DataHash()
    for batch in batches(data, batch_size):
        seen.update(batch)
    return seen.hexdigest()


def test_the_fingerprint_does_not_depend_on_batches():
    assert fingerprint((X, Y), 4) == fingerprint((X, Y), 3) == fingerprint((torch.tensor(X), Y), 10)
    wide = np.random.default_rng(0).normal(size=(6, 5000))
    assert fingerprint(wide, 1) == fingerprint(wide, 4)


def test_the_fingerprint_depends_on_everything_else():
    other = X.copy()
    other[7, 1] += 1e-9
    seen = {
        fingerprint(data)
        for data in ((X, Y), X, (X, Y[::-1]), (X[::-1], Y), (other, Y), (X.astype(np.float32), Y), (X[:9], Y[:9]))
    }
    assert len(seen) == 7


def test_the_fingerprint_knows_names_by_their_text():
    names = np.array(["no", "yes", "perhaps", "no"])
    seen = {
        fingerprint((X[:4], labels), size)
        for labels in (names, names.astype(object), names.tolist())
        for size in (1, 4)
    }
    assert len(seen) == 1
    assert fingerprint((X[:4], names[::-1])) not in seen


def test_empty_batches_are_passed_over():
    inputs, labels, sizes = all_of([(X[:0], Y[:0]), (X[:4], Y[:4]), (X[:0], Y[:0]), (X[4:], Y[4:])])
    assert np.array_equal(inputs, X)
    assert np.array_equal(labels, Y)
    assert sizes == [4, 6]


def test_a_loader_keeps_what_it_does_besides_shuffling():
    def doubled(items):
        return torch.stack([x for x, _ in items]) * 2, torch.stack([y for _, y in items])

    dataset = TensorDataset(torch.tensor(X), torch.tensor(Y))
    inputs, _, _ = all_of(DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=doubled))
    assert np.array_equal(inputs, 2 * X)

    class Scaling(DataLoader):
        """One of the user's own."""

        def __iter__(self):
            return ((100 * x, y) for x, y in super().__iter__())

    inputs, labels, _ = all_of(Scaling(dataset, batch_size=4, shuffle=True))
    assert np.array_equal(inputs[:, 0] // 200, labels)


def test_labels_are_taken_from_the_first_name_of_the_list():
    (batch,) = batches({"y": Y, "label": Y[::-1], "a": X}, 100)
    assert np.array_equal(batch.labels, Y[::-1])
    assert batch.inputs.keys() == {"a", "y"}

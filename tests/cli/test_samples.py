import re
import zipfile

import numpy as np
import pytest

import terrafirma.cli.samples as module
from terrafirma.capture.batches import batches
from terrafirma.cli.samples import read_samples, take
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.recorded import Recorded


@pytest.fixture
def arrays(rng):
    return (
        rng.normal(size=(11, 2, 3)).astype(np.float32),
        rng.integers(0, 5, 11),
        np.array([f"s{i}" for i in range(11)]),
    )


def write_npz(path, X, y, ids):
    np.savez(path, X=X, y=y, id=ids)


def write_npz_compressed(path, X, y, ids):
    np.savez_compressed(path, images=X, target=y, index=ids)


def write_npz_fortran(path, X, y, ids):
    np.savez(path, data=np.asfortranarray(X), label=y, ids=ids)


def write_parquet(path, X, y, ids, form="fixed"):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kind = pa.float32()
    for size in X.shape[:0:-1]:
        kind = pa.list_(kind, size) if form == "fixed" else pa.list_(kind)
    table = {"pixels": pa.array(X.tolist(), kind), "label": pa.array(y), "id": pa.array(ids.tolist())}
    pq.write_table(pa.table(table), path, row_group_size=4)


def write_parquet_lists(path, X, y, ids):
    write_parquet(path, X, y, ids, form="variable")


WRITERS = {
    "npz": write_npz,
    "compressed.npz": write_npz_compressed,
    "fortran.npz": write_npz_fortran,
    "fixed.parquet": write_parquet,
    "lists.parquet": write_parquet_lists,
}


@pytest.mark.parametrize("batch_size", [1, 4, 11, 100])
@pytest.mark.parametrize("form", WRITERS)
def test_what_is_in_a_file_comes_out_in_batches(tmp_path, arrays, form, batch_size):
    X, y, ids = arrays
    path = tmp_path / f"samples.{form}"
    WRITERS[form](path, X, y, ids)
    samples = read_samples(path, batch_size, labelled=True)
    for _ in range(2):  # as often as one likes
        found = list(samples)
        assert max(batch.n for batch in found) <= batch_size
        np.testing.assert_array_equal(np.concatenate([batch.inputs for batch in found]), X)
        np.testing.assert_array_equal(np.concatenate([batch.labels for batch in found]), y)
        assert all(len(batch.inputs) == len(batch.labels) == batch.n for batch in found)
    assert found[0].inputs.dtype == X.dtype
    assert len(samples) == samples.n_samples == 11
    assert samples.ids.tolist() == ids.tolist()
    assert batches(samples, 1) is samples


@pytest.mark.parametrize("form", WRITERS)
def test_labels_are_left_out_where_they_are_not_asked_for(tmp_path, arrays, form):
    path = tmp_path / f"samples.{form}"
    WRITERS[form](path, *arrays)
    assert all(batch.labels is None for batch in read_samples(path, 4, labelled=False))


@pytest.mark.parametrize("order", ["C", "F"])
def test_an_npy_file_holds_inputs(tmp_path, arrays, order):
    np.save(tmp_path / "x.npy", np.asarray(arrays[0], order=order))
    samples = read_samples(tmp_path / "x.npy", 4, labelled=False)
    np.testing.assert_array_equal(np.concatenate([batch.inputs for batch in samples]), arrays[0])
    assert [batch.n for batch in samples] == [4, 4, 3]
    assert samples.ids is None


def test_arrays_of_other_names_are_the_inputs_of_those_names(tmp_path, arrays):
    X, y, _ = arrays
    np.savez(tmp_path / "two.npz", left=X, right=-X, y=y)
    found = list(read_samples(tmp_path / "two.npz", 8, labelled=True))
    np.testing.assert_array_equal(np.concatenate([batch.inputs["right"] for batch in found]), -X)
    np.savez(tmp_path / "one.npz", left=X)
    (batch,) = read_samples(tmp_path / "one.npz", 11, labelled=False)
    assert list(batch.inputs) == ["left"]


def test_columns_of_numbers_are_the_features_of_a_sample(tmp_path, rng):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    a, b = rng.normal(size=7), rng.integers(0, 9, 7)
    table = {"a": a, "y": b % 2, "b": b, "__index_level_0__": b + 10, "c": b > 4}
    pq.write_table(pa.table(table), tmp_path / "t.parquet")
    samples = read_samples(tmp_path / "t.parquet", 3, labelled=True)
    np.testing.assert_array_equal(np.concatenate([batch.inputs for batch in samples]), np.stack([a, b, b > 4], axis=1))
    np.testing.assert_array_equal(np.concatenate([batch.labels for batch in samples]), b % 2)
    np.testing.assert_array_equal(samples.ids, b + 10)


def test_a_recording_is_taken_as_it_is(tmp_path, rng):
    recorded = Recorded(patterns=rng.random((5, 9)) < 0.5, labels=np.arange(5))
    recorded.save(tmp_path / "r.safetensors")
    found = read_samples(tmp_path / "r.safetensors", 2, labelled=True)
    assert isinstance(found, Recorded)
    np.testing.assert_array_equal(take(found, [4, 0]).labels, [4, 0])


def test_rows_are_taken_in_the_order_asked_for(tmp_path, arrays):
    X = arrays[0]
    np.savez(tmp_path / "x.npz", X=X)
    np.testing.assert_array_equal(
        take(read_samples(tmp_path / "x.npz", 4, labelled=False), [9, 0, 5, 0]), X[[9, 0, 5, 0]]
    )
    np.savez(tmp_path / "two.npz", left=X, right=-X)
    taken = take(read_samples(tmp_path / "two.npz", 4, labelled=False), [10, 3])
    np.testing.assert_array_equal(taken["right"], -X[[10, 3]])
    with pytest.raises(InvalidInput, match=re.escape("row must lie in 0 to 10. Got 11; rows count from 0.")):
        take(read_samples(tmp_path / "x.npz", 4, labelled=False), [2, 11])


def test_only_one_batch_of_a_zip_is_read_at_a_time(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "big.npz", X=np.zeros((4096, 1000), np.float32), y=np.zeros(4096, np.int64))
    sizes = []
    read = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda self, n=-1: sizes.append(n) or read(self, n))
    for batch in read_samples(tmp_path / "big.npz", 32, labelled=True):
        assert batch.inputs.shape == (32, 1000)
    assert max(sizes) == 32 * 1000 * 4
    assert min(sizes) >= 0


def test_only_one_group_of_a_parquet_file_is_in_memory_at_a_time(tmp_path, rng):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, X = tmp_path / "big.parquet", rng.random((20_000, 100))
    pq.write_table(pa.table({"x": pa.FixedSizeListArray.from_arrays(X.ravel(), 100)}), path, row_group_size=1000)
    before = pa.total_allocated_bytes()
    used = [pa.total_allocated_bytes() - before for _ in read_samples(path, 100, labelled=False)]
    assert len(used) == 200
    assert max(used) < X.nbytes / 4


# ---------------------------------------------------------------------------------------------------- errors


def raises(error, sentence):
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")


def test_a_missing_file(tmp_path):
    path = tmp_path / "no.npz"
    with raises(FileNotFoundError, f"{path} does not exist. Give the path of a file of samples."):
        read_samples(path, 4, labelled=True)


def test_a_folder(tmp_path):
    (tmp_path / "x.npz").mkdir()
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        read_samples(tmp_path / "x.npz", 4, labelled=True)


def test_an_unknown_ending(tmp_path):
    path = tmp_path / "x.h5"
    path.touch()
    expected = f"A file of samples must end in .npz, .npy, .parquet or .safetensors. Got {path}; save it as one."
    with raises(InvalidInput, expected):
        read_samples(path, 4, labelled=True)


@pytest.mark.parametrize("names", [["X", "labls"], ["X"], ["X", "y", "target"]])
def test_labels_must_be_there_once(tmp_path, names):
    path = tmp_path / "x.npz"
    np.savez(path, **dict.fromkeys(names, np.zeros(3)))
    expected = (
        f"{path} must hold labels under one of the names y, labels, label, targets, target. "
        f"Got {', '.join(names)}; rename them."
    )
    with raises(InvalidInput, expected):
        read_samples(path, 4, labelled=True)


@pytest.mark.parametrize(("names", "shown"), [(["y", "id"], "y, id"), ([], "no array")])
def test_inputs_must_be_there(tmp_path, names, shown):
    path = tmp_path / "x.npz"
    np.savez(path, **dict.fromkeys(names, np.zeros(3)))
    expected = (
        f"{path} must hold inputs, under one of the names X, x, inputs, images, data or those of the network's inputs. "
        f"Got {shown}; add them."
    )
    with raises(InvalidInput, expected):
        read_samples(path, 4, labelled=False)


def test_rows_must_pair(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, X=np.zeros((3, 2)), y=np.zeros(4), id=np.zeros(3))
    expected = f"{path} must hold one row for each sample in every array. Got 3 of X, 4 of y, 3 of id; pair them anew."
    with raises(InvalidInput, expected):
        read_samples(path, 4, labelled=True)


def test_no_sample(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((0, 3)))
    with raises(InvalidInput, f"{path} must hold at least one sample. Got none."):
        read_samples(path, 4, labelled=False)


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.array([{}, 1]), "object and shape (2,)"),
        (np.float64(3), "float64 and shape ()"),
        (np.zeros(2, "f8,f8"), "[('f0', '<f8'), ('f1', '<f8')] and shape (2,)"),
    ],
)
def test_arrays_must_be_plain(tmp_path, array, shown):
    for path, name in ((tmp_path / "x.npz", "X.npy"), (tmp_path / "x.npy", "X")):
        np.savez(path, X=array) if path.suffix == ".npz" else np.save(path, array)
        expected = (
            f"Arrays of {path} must be plain numbers or text, with a row for each sample. Got {name} of {shown}; convert it, "
            "or leave it out."
        )
        with raises(InvalidInput, expected):
            read_samples(path, 4, labelled=False)


@pytest.mark.parametrize("form", ["npz", "compressed.npz", "fortran.npz", "fixed.parquet", "npy"])
def test_truncated_files_are_refused(tmp_path, arrays, form):
    path = tmp_path / f"x.{form}"
    WRITERS[form](path, *arrays) if form != "npy" else np.save(path, arrays[0])
    whole = path.read_bytes()
    for keep in (0, 20, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:keep])
        with pytest.raises(
            BadFile, match=f"^{re.escape(str(path))} is not a whole {path.suffix} file .* save it again.$"
        ):
            list(read_samples(path, 4, labelled=form != "npy"))


@pytest.mark.parametrize("form", ["npz", "compressed.npz", "fortran.npz"])
def test_the_checksums_of_a_zip_are_compared(tmp_path, arrays, form):
    path = tmp_path / f"x.{form}"
    WRITERS[form](path, *arrays)
    with zipfile.ZipFile(path) as file:
        checksums = [member.CRC.to_bytes(4, "little") for member in file.infolist()[:2]]
    data = path.read_bytes()
    for checksum in checksums:
        path.write_bytes(data.replace(checksum, b"oops"))
        with pytest.raises(BadFile, match="is not a whole .npz file .Bad CRC-32"):
            list(read_samples(path, 4, labelled=True))


def test_an_array_that_ends_early_in_a_whole_zip_is_noticed(tmp_path):
    path = tmp_path / "x.npz"
    np.save(tmp_path / "x.npy", np.zeros((9, 2)))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("X.npy", (tmp_path / "x.npy").read_bytes()[:-8])
    expected = f"{path} is not a whole .npz file (X ends after 8 rows of 9). It is truncated or of another kind; save it again."
    with raises(BadFile, expected):
        list(read_samples(path, 4, labelled=False))


def test_columns_that_are_no_numbers(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    sentence = "Inputs of {} must be one column of lists of numbers, or columns of numbers. Got {}; leave it out."
    pq.write_table(pa.table({"a": [1.0, 2.0], "name": ["x", "y"]}), path)
    with raises(InvalidInput, sentence.format(path, "name of type string")):
        read_samples(path, 4, labelled=False)
    pq.write_table(pa.table({"a": [[1.0], [2.0]], "b": [1, 2]}), path)
    with raises(InvalidInput, sentence.format(path, "a of type list<element: double>")):
        read_samples(path, 4, labelled=False)


def test_values_that_are_missing(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    for column in ([1.0, None, 3.0], [[1.0], None, [2.0]], [[1.0], [None], [2.0]]):
        pq.write_table(pa.table({"a": column}), path)
        with raises(InvalidInput, f"{path} must have a value in every row. Got 1 nulls in a; fill them."):
            list(read_samples(path, 4, labelled=False))


def test_lists_of_unequal_length(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [[1.0], [1.0, 2.0]]}), path)
    with raises(InvalidInput, f"Lists of {path} must be equally long. Got 1 to 2 in a; pad them."):
        list(read_samples(path, 4, labelled=False))


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=re.escape('pip install "terrafirma[parquet]"')):
        read_samples(tmp_path / "x.parquet", 4, labelled=False)


def test_every_ending_has_a_reader():
    assert list(module.TABLES) == [".npz", ".npy", ".parquet"]


def test_a_recording_of_no_samples_is_refused(tmp_path):
    path = tmp_path / "none.safetensors"
    Recorded(labels=np.zeros(0, int)).save(path)
    with pytest.raises(InvalidInput, match=re.escape(f"{path} must hold at least one sample. Got none.")):
        read_samples(path, 4, labelled=False)


@pytest.mark.parametrize(
    "header",
    [
        "{[]: 1}",
        "((((",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-3, 4)}",
        "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (3,)}",
    ],
    ids=["no dict", "no Python", "negative", "dates"],
)
def test_headers_that_lie_are_one_sentence(tmp_path, header):
    text = header.encode().ljust(117) + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 96
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as file:
        file.writestr("X.npy", array)
    with pytest.raises((BadFile, InvalidInput), match=r"x\.npz"):
        list(read_samples(tmp_path / "x.npz", 4, labelled=False))

import json
import os
import re

import numpy as np
import pytest
import safetensors.numpy

from terrafirma import storage
from terrafirma.errors import BadFile, InvalidInput

ARRAYS = {"a": np.arange(6.0).reshape(2, 3), "b": np.array([1, 2**63], dtype=np.uint64), "empty": np.zeros(0, np.int64)}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "thing.safetensors"
    storage.write_arrays(path, "Thing", ARRAYS, {"rho": 0.1, "name": "ü"})
    return path


def test_what_is_written_is_read(path):
    arrays, settings = storage.read_arrays(path, "Thing")
    assert settings == {"rho": 0.1, "name": "ü"}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)


def test_shapes_and_orders_of_every_kind(tmp_path, rng):
    """A lone number stays without an axis; views that are not contiguous are written row by row."""
    arrays = {"number": np.array(3.0), "none": np.zeros((0, 4)), "view": rng.random((5, 6)).T[::2]}
    storage.write_arrays(tmp_path / "f", "kind", arrays, {})
    read, _ = storage.read_arrays(tmp_path / "f", "kind")
    for name, array in arrays.items():
        assert read[name].shape == array.shape
        assert np.array_equal(read[name], array)


def test_other_kinds_are_refused(path):
    with pytest.raises(BadFile, match="holds a Thing, not a Guard. Load it with the class that saved it."):
        storage.read_arrays(path, "Guard")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_files_are_refused(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadFile, match="is not a whole safetensors file .* truncated or of another kind"):
        storage.read_arrays(path, "Thing")


def test_a_text_file_is_refused(path):
    path.write_text("rho = 16\n" * 100)
    with pytest.raises(BadFile, match="is not a whole safetensors file"):
        storage.read_arrays(path, "Thing")


def test_foreign_safetensors_are_refused(path):
    path.write_bytes(safetensors.numpy.save(ARRAYS))
    with pytest.raises(BadFile, match="was not written by terrafirma. Load files that its save wrote."):
        storage.read_arrays(path, "Thing")


def test_every_altered_byte_of_the_arrays_is_noticed(path):
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    for i in range(start, len(data)):
        altered = bytearray(data)
        altered[i] ^= 1
        path.write_bytes(altered)
        with pytest.raises(BadFile, match="has been altered: its content does not match its checksum. Save it again."):
            storage.read_arrays(path, "Thing")


def test_altered_settings_are_noticed(path):
    path.write_bytes(path.read_bytes().replace(b'\\"rho\\": 0.1', b'\\"rho\\": 0.2'))
    with pytest.raises(BadFile, match="has been altered"):
        storage.read_arrays(path, "Thing")


def test_newer_formats_are_refused(path):
    header = {"format": storage.FORMAT + 1, "kind": "Thing", "version": "99.0"}
    path.write_bytes(safetensors.numpy.save(ARRAYS, metadata={"terrafirma": json.dumps(header)}))
    with pytest.raises(BadFile, match=r"has format 2, written by terrafirma 99.0; .* Install the newer version."):
        storage.read_arrays(path, "Thing")


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        storage.read_arrays(tmp_path / "nothing", "Thing")


def test_folders_are_named(tmp_path):
    with pytest.raises(BadFile, match="is a folder. Load the file that save wrote."):
        storage.read_arrays(tmp_path, "Thing")
    with pytest.raises(BadFile, match="cannot be written: it is a folder."):
        storage.write_arrays(tmp_path, "Thing", ARRAYS, {})
    with pytest.raises(BadFile, match="nowhere/x cannot be written: its folder does not exist."):
        storage.write_arrays(tmp_path / "nowhere" / "x", "Thing", ARRAYS, {})


def test_a_crash_half_way_leaves_the_old_file_whole(path, monkeypatch):
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        storage.write_arrays(path, "Thing", {"a": np.ones(1000)}, {})
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_files_get_the_usual_permissions(path, tmp_path):
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_a_file_keeps_its_permissions(path):
    path.chmod(0o664)
    storage.write_arrays(path, "Thing", ARRAYS, {})
    assert path.stat().st_mode & 0o777 == 0o664


def test_read_only_files_and_pipes_are_left_alone(path, tmp_path):
    path.chmod(0o444)
    before = path.read_bytes()
    with pytest.raises(BadFile, match="thing.safetensors cannot be written: it is read-only."):
        storage.write_arrays(path, "Thing", {}, {})
    assert path.read_bytes() == before
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFile, match="pipe cannot be written: it is not a regular file."):
        storage.write_arrays(tmp_path / "pipe", "Thing", ARRAYS, {})


def test_links_in_a_circle_are_named(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises((BadFile, OSError), match="a"):
        storage.write_arrays(tmp_path / "a", "Thing", ARRAYS, {})


def test_errors_of_the_system_name_the_users_file(path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*thing.safetensors'"):
        storage.write_arrays(path, "Thing", ARRAYS, {})


@pytest.mark.parametrize("dtype", ["bool", "i1", "u2", "<i4", ">i8", "u8", "f2", ">f4", "f8"])
def test_every_type_of_number_comes_back(tmp_path, dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    storage.write_arrays(tmp_path / "a", "Thing", {"a": array[:, ::2], "empty": array[:0], "one": array[0, 1:2]}, {})
    arrays, _ = storage.read_arrays(tmp_path / "a", "Thing")
    np.testing.assert_array_equal(arrays["a"], array[:, ::2])
    assert arrays["a"].dtype == array.dtype.newbyteorder("=")
    assert arrays["empty"].shape == (0, 4)
    np.testing.assert_array_equal(arrays["one"], array[0, 1:2])


@pytest.mark.parametrize(
    "array", [np.array(["a"]), np.array([object()]), np.array([1j])], ids=["text", "object", "complex"]
)
def test_what_is_no_number_is_refused_and_nothing_written(tmp_path, array):
    message = f"a must be numbers or bool to be saved. Got {array.dtype}; number the classes, say."
    with pytest.raises(InvalidInput, match=re.escape(message)):
        storage.write_arrays(tmp_path / "a", "Thing", {"a": array}, {})
    assert not list(tmp_path.iterdir())


def test_settings_alone_come_back_and_are_checked(tmp_path):
    storage.write_json(tmp_path / "card.json", "Thing", {"rho": 0.1, "names": ["a", "ü"]})
    assert storage.read_json(tmp_path / "card.json", "Thing") == {"rho": 0.1, "names": ["a", "ü"]}
    text = (tmp_path / "card.json").read_text()
    (tmp_path / "card.json").write_text(text.replace("0.1", "0.2", 1))
    with pytest.raises(BadFile, match="has been altered"):
        storage.read_json(tmp_path / "card.json", "Thing")


def test_a_failure_while_replacing_leaves_the_old_file(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), storage.replacing(path) as temporary:
        temporary.write_bytes(b"half" * (1 // 0))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]
    assert path.read_text() == "old"
    with storage.replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"

"""A guard as a folder: ``guard.json`` to read, one safetensors file with the arrays, and the network where it is an ONNX file.

The arrays are written under a new name and count only once ``guard.json`` names them: a save that is killed leaves the old
guard whole.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import storage
from terrafirma.capture.network import Network
from terrafirma.capture.record import as_network
from terrafirma.core.patterns import PackedPatterns
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.guard.state import Samples, Selected, State
from terrafirma.policy import ErrorProbability, Policy
from terrafirma.recorded import ClippedError, ErrorFunction, Recorded
from terrafirma.scores.subfunction import SubfunctionBound

__all__ = ["about", "check_target", "load", "save"]

KIND = "Guard"
CARD = "guard.json"
LIBRARIES = ("numpy", "scipy", "numba", "scikit-learn", "torch", "onnxruntime")
Arrays = dict[str, npt.NDArray[Any]]


def save(path: str | os.PathLike[str], state: State, network: Network | None, error: ErrorFunction | None) -> None:
    """Write the folder; an older guard in it is replaced at once, anything else is left alone."""
    folder = check_target(path)
    arrays, settings = _to_arrays(state)
    settings |= {"error": _error_settings(error), "network": _network_settings(network), "libraries": _libraries()}
    folder.mkdir(parents=True, exist_ok=True)
    old = set(_own_files(folder))
    new = f"arrays-{secrets.token_hex(4)}.safetensors"
    try:
        storage.write_arrays(folder / new, KIND, arrays, settings)
        copied = _copy_network(folder, network)
        storage.write_json(folder / CARD, KIND, {"arrays": new, "network_file": copied} | settings)
    except BaseException:
        (folder / new).unlink(missing_ok=True)
        raise
    for name in old - {new, copied}:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def check_target(path: str | os.PathLike[str]) -> Path:
    """Raise unless a guard may be saved there."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"path must be a folder. Got the file {folder}.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CARD).exists():
        raise InvalidInput(f"path must be an empty folder, or one with a guard. Got {folder}, which holds other files.")
    return folder


def about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the folder says of its guard, for people: nothing but ``guard.json`` is read."""
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist. Save a guard there first.")
    if not (folder / CARD).is_file():
        raise BadFile(f"{folder} holds no guard: there is no {CARD} in it. Load the folder that Guard.save wrote.")
    return storage.read_json(folder / CARD, KIND)


def load(path: str | os.PathLike[str], model: Any) -> tuple[State, Any, ErrorFunction | None]:
    """The state, the network (that of the folder, where none is given) and the error function, where it is known."""
    folder, card = Path(path), about(path)
    try:
        arrays, settings = storage.read_arrays(folder / card["arrays"], KIND)
        if {"arrays": card["arrays"], "network_file": card["network_file"]} | settings != card:
            raise BadFile(f"{folder / CARD} and {card['arrays']} do not belong together. Save the guard again.")
        state = _from_arrays(arrays, settings)
        error = ClippedError(settings["error"]["clipped"]) if "clipped" in settings["error"] else None
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, FileNotFoundError) as problem:
        if isinstance(problem, BadFile):
            raise
        raise BadFile(f"{folder} does not hold a whole guard ({problem!r:.200}). Save it again.") from problem
    if model is None and card["network_file"] is not None:
        model = folder / card["network_file"]
    if model is not None and settings["network"] is not None:
        _check_network(folder, as_network(model), settings["network"])
    return state, model, error


def _check_network(folder: Path, network: Network, known: Mapping[str, Any]) -> None:
    fingerprint = network.fingerprint()
    if fingerprint != known["fingerprint"]:
        raise InvalidInput(
            f"model must be the network that the guard in {folder} was fitted with: {known['name']}, fingerprint "
            f"{known['fingerprint'][:12]}. Got {network.name}, fingerprint {fingerprint[:12]}; fit a guard for this one."
        )


def _to_arrays(state: State) -> tuple[Arrays, dict[str, Any]]:
    arrays: Arrays = {}
    bound, score_settings = state.bound.to_arrays()
    _put(arrays, "score", bound)
    samples = {"ids": state.samples.ids, "errors": state.samples.errors}
    _put(arrays, "samples", samples if state.samples.labels is None else samples | {"labels": state.samples.labels})
    calibration = state.calibration
    if calibration.patterns is None or calibration.errors is None:
        raise InvalidInput("The guard must keep calibration patterns and errors. Got none; fit it again.")
    _put(arrays, "calibration", {"words": calibration.patterns.words, "errors": calibration.errors})
    settings: dict[str, Any] = {
        "layers": dict(zip(state.layer_names, state.widths, strict=False)),
        "reduce": state.reduce,
        "sign": "a unit is active where its pre-activation is > 0",
        "classifies": state.classifies,
        "risk": float(state.risk),
        "confidence": float(state.confidence),
        "n_samples": len(state.samples.ids),
        "samples_seen": state.samples.seen,
        "data_fingerprints": dict(state.fingerprints),
        "history": list(state.history),
        "score": score_settings,
        "decides": "stale" if state.policy is None else str(state.policy),
        "selected": None if state.selected is None else vars(state.selected),
    }
    for name, part in (("policy", state.policy), ("error_probability", state.error_probability)):
        settings[name] = None
        if part is not None:
            part_arrays, settings[name] = part.to_arrays()
            _put(arrays, name, part_arrays)
    return arrays, settings


def _from_arrays(arrays: Arrays, settings: dict[str, Any]) -> State:
    score = SubfunctionBound.from_arrays(_under(arrays, "score"), settings["score"])
    samples, calibration = _under(arrays, "samples"), _under(arrays, "calibration")
    policy, probability = settings["policy"], settings["error_probability"]
    return State(
        score=score,
        layer_names=tuple(settings["layers"]),
        widths=tuple(settings["layers"].values()),
        reduce=settings["reduce"],
        classifies=settings["classifies"],
        samples=Samples(samples["ids"], samples["errors"], samples.get("labels"), settings["samples_seen"]),
        calibration=Recorded(
            patterns=PackedPatterns(calibration["words"], score.n_units_), errors=calibration["errors"]
        ),
        risk=settings["risk"],
        confidence=settings["confidence"],
        fingerprints=settings["data_fingerprints"],
        history=tuple(settings["history"]),
        selected=None if settings["selected"] is None else Selected(**settings["selected"]),
        policy=None if policy is None else Policy.from_arrays(_under(arrays, "policy"), policy),
        error_probability=(
            None
            if probability is None
            else ErrorProbability.from_arrays(_under(arrays, "error_probability"), probability)
        ),
    )


def _put(arrays: Arrays, prefix: str, some: Mapping[str, npt.NDArray[Any]]) -> None:
    arrays.update({f"{prefix}/{name}": np.asarray(value) for name, value in some.items()})


def _under(arrays: Arrays, prefix: str) -> Arrays:
    return {name.partition("/")[2]: value for name, value in arrays.items() if name.partition("/")[0] == prefix}


def _own_files(folder: Path) -> list[str]:
    """Files that an earlier save wrote."""
    if not (folder / CARD).exists():
        return []
    with contextlib.suppress(BadFile):
        card = storage.read_json(folder / CARD, KIND)
        return [name for name in (card.get("arrays"), card.get("network_file")) if name]
    return []


def _error_settings(error: ErrorFunction | None) -> dict[str, Any]:
    if error is None:
        return {}
    return (
        {"clipped": float(error.scale)}
        if isinstance(error, ClippedError)
        else {"function": getattr(error, "__name__", "?")}
    )


def _network_settings(network: Network | None) -> dict[str, Any] | None:
    return None if network is None else {"name": network.name, "fingerprint": network.fingerprint()}


def _copy_network(folder: Path, network: Network | None) -> str | None:
    """An ONNX file travels with the guard; other networks are code, which no file of ours holds."""
    model = getattr(network, "file_bytes", None)
    if network is None or model is None:
        return None
    mark = network.fingerprint()[:12]
    name = f"{network.name.removesuffix(f'-{mark}')}-{mark}.onnx"
    if not (folder / name).exists():
        storage.write_bytes(folder / name, model())
    return name


def _libraries() -> dict[str, str]:
    """Versions of what the guard was made with."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found

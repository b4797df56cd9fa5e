"""A guard as a folder: ``guard.json`` to read, one safetensors file with the arrays, and the network where it is an ONNX file.

The arrays are written under a new name and count only once ``guard.json`` names them: a save that is killed leaves the old
guard whole.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from terrafirma import scores, storage
from terrafirma.capture.network import Network
from terrafirma.capture.record import as_network
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import BadFile, InvalidInput
from terrafirma.guard.state import Samples, Selected, State
from terrafirma.policy import ErrorProbability, Policy
from terrafirma.recorded import ClippedError, ErrorFunction, Recorded
from terrafirma.scores.base import Score
from terrafirma.scores.subfunction import SubfunctionBound

__all__ = ["about", "check_network", "check_target", "load", "save"]

KIND = "Guard"
CARD = "guard.json"
OWN = re.compile(r"guard\.json|arrays-[0-9a-f]{8}\.safetensors|.*-[0-9a-f]{12}\.onnx|\.terrafirma-[0-9a-f]+\.tmp")
LIBRARIES = ("numpy", "scipy", "numba", "scikit-learn", "torch", "onnxruntime")
Arrays = dict[str, npt.NDArray[Any]]


def save(path: str | os.PathLike[str], state: State, network: Network | None, error: ErrorFunction | None) -> None:
    """Write the folder; an older guard in it is replaced at once, anything else is left alone."""
    folder = check_target(path)
    if network is not None:
        check_network(network, state.network)
    arrays, settings = _to_arrays(state)
    settings |= {"error": _error_settings(error), "libraries": _libraries()}
    folder.mkdir(parents=True, exist_ok=True)
    old = {file.name for file in folder.iterdir()}
    new = f"arrays-{secrets.token_hex(4)}.safetensors"
    copied = None
    try:
        storage.write_arrays(folder / new, KIND, arrays, settings)
        copied = _copy_network(folder, network)
        storage.write_json(folder / CARD, KIND, {"arrays": new, "network_file": copied} | settings)
    except BaseException:
        for name in {new, copied} - old - {None}:
            (folder / str(name)).unlink(missing_ok=True)
        raise
    for name in old - {new, copied, CARD}:
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def check_target(path: str | os.PathLike[str]) -> Path:
    """Raise unless a guard may be saved there."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(f"path must be a folder. Got the file {folder}.")
    if folder.is_dir() and not all(OWN.fullmatch(file.name) for file in folder.iterdir()):
        raise InvalidInput(f"path must be an empty folder, or one with a guard. Got {folder}, which holds other files.")
    return folder


def about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What the folder says of its guard, for people: nothing but ``guard.json`` is read."""
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist. Save a guard there first.")
    if not (folder / CARD).is_file():
        raise BadFile(f"{folder} holds no guard: there is no {CARD} in it. Load the folder that Guard.save wrote.")
    card = storage.read_json(folder / CARD, KIND)
    for name in (card.get("arrays"), card.get("network_file")):  # they are opened, and replaced, in this folder alone
        if name is not None and not (
            isinstance(name, str) and OWN.fullmatch(name) and "/" not in name and "\\" not in name
        ):
            raise BadFile(f"{folder / CARD} names a file that no guard has ({name!r:.80}). Save the guard again.")
    return card


def load(path: str | os.PathLike[str], model: Any) -> tuple[State, Any, ErrorFunction | None]:
    """The state, the network (that of the folder, where none is given) and the error function, where it is known."""
    folder, card = Path(path), about(path)
    if card.get("score", {}).get("with_model") and model is None:
        raise InvalidInput(
            f"The guard in {folder} must be given its network, of which its score takes gradients. Load it with model=."
        )
    try:
        arrays, settings = storage.read_arrays(folder / card["arrays"], KIND)
        if {"arrays": card["arrays"], "network_file": card["network_file"]} | settings != card:
            raise BadFile(f"{folder / CARD} and {card['arrays']} do not belong together. Save the guard again.")
        state = _from_arrays(arrays, settings, model)
        error = _error_function(settings["error"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, FileNotFoundError) as problem:
        if isinstance(problem, BadFile):
            raise
        raise BadFile(f"{folder} does not hold a whole guard ({problem!r:.200}). Save it again.") from problem
    if model is None and card["network_file"] is not None:
        model = folder / card["network_file"]
    if model is not None:
        check_network(as_network(model), state.network)
    return state, model, error


def check_network(network: Network, known: tuple[str, str] | None) -> None:
    """Raise unless this is the network of the fit, with the weights that it had then."""
    if known is None:
        return
    (name, mark), now = known, network.fingerprint()
    if now != mark:
        raise InvalidInput(
            f"The network must be the one that the guard was fitted with: {name}, fingerprint {mark[:12]}. Got {network.name}, "
            f"fingerprint {now[:12]}: another, or the same with other weights; fit a guard for this one."
        )


def _to_arrays(state: State) -> tuple[Arrays, dict[str, Any]]:
    arrays: Arrays = {}
    if not isinstance(state.score, SubfunctionBound | Score):
        raise InvalidInput(
            f"A guard that is saved must have a score of terrafirma's, or a registered one. Got {type(state.score).__name__}; "
            "make it a subclass of terrafirma.scores.Score and register it."
        )
    learned, score_settings = state.score.to_arrays()
    _put(arrays, "score", learned)
    samples = {"ids": state.samples.ids, "errors": state.samples.errors}
    _put(arrays, "samples", samples if state.samples.labels is None else samples | {"labels": state.samples.labels})
    kept, calibration_settings = replace(state.calibration, source=None).to_arrays()
    _put(arrays, "calibration", kept)
    settings: dict[str, Any] = {
        "decides": "stale" if state.policy is None else str(state.policy),
        "network": None if state.network is None else dict(zip(("name", "fingerprint"), state.network, strict=True)),
        "classes": None if state.classes is None else state.classes.tolist(),
        "layers": list(state.layer_names),
        "widths": list(state.widths),
        "reduce": state.reduce,
        "sign": "a unit is active where its pre-activation is > 0",
        "risk": float(state.risk),
        "confidence": float(state.confidence),
        "n_samples": len(state.samples.ids),
        "samples_seen": state.samples.seen,
        "data_fingerprints": dict(state.fingerprints),
        "history": list(state.history),
        "score": score_settings,
        "calibration": calibration_settings,
        "selected": None if state.selected is None else vars(state.selected),
    }
    for name, part in (("policy", state.policy), ("error_probability", state.error_probability)):
        settings[name] = None
        if part is not None:
            part_arrays, settings[name] = part.to_arrays()
            _put(arrays, name, part_arrays)
    return arrays, settings


def _from_arrays(arrays: Arrays, settings: dict[str, Any], model: Any) -> State:
    learned, about = _under(arrays, "score"), settings["score"]
    named = "name" in about
    score = scores.from_arrays(learned, about, model) if named else SubfunctionBound.from_arrays(learned, about)
    samples = _under(arrays, "samples")
    policy, probability = settings["policy"], settings["error_probability"]
    return State(
        score=score,
        layer_names=tuple(settings["layers"]),
        widths=tuple(settings["widths"]),
        reduce=settings["reduce"],
        network=None
        if settings["network"] is None
        else (settings["network"]["name"], settings["network"]["fingerprint"]),
        classes=None if settings["classes"] is None else np.array(settings["classes"]),
        samples=Samples(samples["ids"], samples["errors"], samples.get("labels"), settings["samples_seen"]),
        calibration=Recorded.from_arrays(_under(arrays, "calibration"), settings["calibration"]),
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


def _error_settings(error: ErrorFunction | None) -> dict[str, Any]:
    if error is None:
        return {}
    if isinstance(error, ClippedError):
        return {"clipped": float(error.scale)}
    return {
        "function": error.name if isinstance(error, LostError) else getattr(error, "__name__", type(error).__name__)
    }


def _error_function(settings: Mapping[str, Any]) -> ErrorFunction | None:
    if "clipped" in settings:
        return ClippedError(settings["clipped"])
    return LostError(settings["function"]) if "function" in settings else None


@dataclass(frozen=True)
class LostError:
    """Stands for an error function that a guard was fitted with and no file holds."""

    name: str

    def __call__(self, _outputs: npt.NDArray[Any], _labels: npt.NDArray[Any], /) -> FloatArray:
        """Say that it has to be given again."""
        raise InvalidInput(
            f"The guard was fitted with an error function of the user's own ({self.name}), which no file holds. "
            "Load it with Guard.load(path, model, error=...)."
        )


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

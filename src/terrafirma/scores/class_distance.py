"""Class distance: Mahalanobis distances to the nearest class in several layers, joined to the odds of an error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from terrafirma.core._threads import row_ranges
from terrafirma.core.patterns import FloatArray
from terrafirma.errors import InvalidInput
from terrafirma.recorded import Recorded
from terrafirma.scores.base import ROWS, Score, check_moves, classes_of
from terrafirma.scores.gaussian import TiedGaussian, fit_tied
from terrafirma.scores.joining import Joined

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ClassDistance"]

MOST_UNITS = 8192  # of a layer
PARTS = ("centre", "whitening", "means", "rest")  # of a TiedGaussian


class ClassDistance(Score):
    """Squared Mahalanobis distance to the nearest class, in each recorded layer; of several, a weighted sum.

    Maps (n, C, H, W) are averaged over positions, as ``record(features=["names", ...])`` does; ``features=True`` with
    ``reduce="none"`` flattens them. Distances (not squared: their tails are lighter, and 0 is no special case)
    are standardised and weighted by a logistic regression that predicts the validation data's errors. A weight below 0 would
    make samples far from everything look reliable; such layers are left out. Classes are not balanced, as that would count a
    handful of errors as many. With fewer than 5 wrong or 5 right validation samples: the mean; ``joined_by_`` tells.

    ``epsilon``: how far inputs are moved towards the nearest class, for each layer, before distances are taken. It takes
    ``model``, the torch module that was recorded, and recorded inputs; without ``model`` inputs stay as they are.

    ``variant="published"``: maps flattened, inputs moved by the gradient itself, squared distances, and weights of any sign
    that predict the training data's errors.
    """

    name: ClassVar[str] = "class_distance"
    paper: ClassVar[str] = "Lee et al., NeurIPS 2018"
    cost: ClassVar[str] = "each layer: fit O(N d^2 + d^3); a query O(d^2 + C d), with model= two passes and one back"
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {"epsilon": (0.0, 0.001, 0.005, 0.01, 0.05, 0.1)}
    needs = frozenset({"features", "labels"})
    helped_by = frozenset({"layers"})
    uses_validation: ClassVar[bool] = True
    epsilon_: float
    layers_: list[str]
    centre_: dict[str, FloatArray]
    whitening_: dict[str, FloatArray]
    means_: dict[str, FloatArray]
    rest_: dict[str, FloatArray]
    joined_by_: str
    join_: dict[str, FloatArray]  # the parts of a Joined

    def __init__(self, epsilon: float | None = None, model: Any = None, variant: str | None = None) -> None:
        self.epsilon = epsilon
        self.model = model
        self.variant = variant
        if model is not None:
            self.needs = self.needs | {"inputs", "gradients"}
        if variant == "published":
            self.needs = self.needs | {"errors"}

    def check(self) -> None:
        """Raise where a hyperparameter breaks a rule."""
        super().check()
        if self.epsilon is not None or self.model is not None:
            from terrafirma.capture.gradients import check_nudge

            check_nudge(self.epsilon, self.model)
        check_moves(self.name, self.epsilon, self.model)

    def check_needs(self, recorded: Any, role: str, fields: frozenset[str]) -> None:
        """Raise where a field is lacking; layers stand for features."""
        super().check_needs(recorded, role, fields - ({"features"} if getattr(recorded, "layers", None) else set()))

    @property
    def train_needs(self) -> frozenset[str]:
        """What it needs of the training data: only the published regression moves its inputs."""
        return self.needs if self.variant == "published" else self.needs - {"inputs"}

    def open_settings(self, recorded: Recorded) -> list[dict[str, Any]]:
        """Without a network, inputs stay as they are; as published, they never do."""
        settings = super().open_settings(recorded)
        if self.epsilon is None and self.model is None:
            return settings[:1]
        return settings[1:] if self.epsilon is None and self.variant == "published" else settings

    def trials(self, train: Recorded, validation: Recorded | None) -> Iterator[tuple[Self, FloatArray]]:
        """Each setting in turn: the Gaussians are the same for all, and validation distances are taken once for each."""
        first = self.with_setting({})
        first._learn_layers(train)
        for setting in self.open_settings(train if validation is None else validation):
            trial = self.with_setting(setting)
            vars(trial).update({name: value for name, value in first._fitted().items() if name != "settings_"})
            lengths = None if validation is None else trial._lengths(validation, trial.epsilon_)
            trial._learn_join(train, validation, lengths)
            yield trial, np.zeros(0) if lengths is None else Joined(**trial.join_)(lengths)

    def learn(self, train: Recorded, validation: Recorded | None) -> None:
        """Find the Gaussians of each layer, and how to join the distances."""
        self._learn_layers(train)
        self._learn_join(train, validation, None if validation is None else self._lengths(validation, self.epsilon_))

    def score(self, recorded: Recorded) -> FloatArray:
        """The joined distances."""
        return Joined(**self.join_)(self._lengths(recorded, self.epsilon_))

    def _learn_join(self, train: Recorded, validation: Recorded | None, lengths: FloatArray | None) -> None:
        """Find what weighs the layers; ``lengths``: of the validation data."""
        published, joined = self.variant == "published", None
        if len(self.layers_) == 1:
            one = np.ones(1)
            self.joined_by_, self.join_ = "one layer", dict(vars(Joined(0 * one, one, one, np.zeros(()))))
            return
        errors = None if validation is None else validation.errors
        if published:
            lengths, errors = self._lengths(train, self.epsilon_), train.errors
        elif lengths is None:
            lengths = self._lengths(train, 0.0)
        if errors is not None:
            joined = Joined.by_errors(lengths, errors, any_sign=published)
        self.joined_by_ = "mean" if joined is None else "regression"
        self.join_ = dict(vars(joined or Joined.mean(lengths)))

    # ------------------------------------------------------------------------------------------ distances

    def _learn_layers(self, train: Recorded) -> None:
        labels = classes_of(train, self.name)
        self.layers_ = list(train.layers) or [train.layer_names[-1] if train.layer_names else "features"]
        if self.model is not None:
            from terrafirma.capture.gradients import check_layers

            check_layers(self.model, self.layers_)  # rather now than after all Gaussians
        for part in PARTS:
            setattr(self, f"{part}_", {})
        for name in self.layers_:
            fitted = fit_tied(self._units(train, name), labels)
            for part in PARTS:
                getattr(self, f"{part}_")[name] = getattr(fitted, part)

    def _gaussian(self, name: str) -> TiedGaussian:
        return TiedGaussian(*(getattr(self, f"{part}_")[name] for part in PARTS))

    def _units(self, recorded: Recorded, name: str, width: int | None = None) -> npt.NDArray[Any]:
        """What a layer gave as a matrix."""
        alone = not recorded.layers and len(self.layers_) == 1
        values = recorded.features if alone else recorded.layers.get(name)
        if values is None:
            raise InvalidInput(f"layers must hold {name!r}, as the training data's. Got {', '.join(recorded.layers)}.")
        if values.dtype.kind not in "biuf" or values.ndim < 2:
            raise InvalidInput(
                f"Layer {name!r} must be numbers of shape (n, units), or maps. Got {values.dtype} of shape {values.shape}."
            )
        if values.ndim > 2 and self.variant is None:
            values = values.mean(axis=tuple(range(2, values.ndim)), dtype=np.float64)
        values = values.reshape(len(values), -1)
        if not np.isfinite(values).all():
            raise InvalidInput(
                f"Layer {name!r} must be finite. Got NaN or infinity; look for an overflow in the network."
            )
        if values.shape[1] > MOST_UNITS:
            raise InvalidInput(
                f"Layer {name!r} must have at most {MOST_UNITS} units: beyond, its covariance alone takes gigabytes. Got "
                f"{values.shape[1]}; record with reduce='mean', which pools maps, or leave the layer out."
            )
        if width is not None and values.shape[1] != width:
            raise InvalidInput(
                f"Layer {name!r} must have {width} units, as the training data. Got {values.shape[1]}; record both alike."
            )
        return values

    def _lengths(self, recorded: Recorded, epsilon: float) -> FloatArray:
        """Distance to the nearest class (n, layers); squared where the layers are not joined by us."""
        found = np.empty((len(recorded), len(self.layers_)))
        for rows in row_ranges(len(recorded), ROWS):
            part = recorded[rows]
            for i, name in enumerate(self.layers_):
                gaussian = self._gaussian(name)
                width = len(gaussian.centre)
                features = self._moved(part, name, epsilon) if epsilon > 0 else self._units(part, name, width)
                found[rows, i] = gaussian.nearest(features)
        return found if self.variant == "published" or len(self.layers_) == 1 else np.sqrt(found)

    def _moved(self, recorded: Recorded, name: str, epsilon: float) -> npt.NDArray[Any]:
        """What a layer gives of inputs that were moved towards the class that is nearest there."""
        from terrafirma.capture.gradients import nudge

        inputs = recorded.need("inputs", by=f"The score {self.name} with epsilon > 0")
        gaussian = self._gaussian(name)
        width = {name: len(gaussian.centre)}
        raw = self.variant == "published"

        def distance(_: Tensor, features: Mapping[str, Tensor]) -> Tensor:
            return _nearest(gaussian, features[name])

        moved = nudge(self.model, inputs, distance, epsilon, width, expected=recorded.outputs, raw=raw)
        return moved.features[name]


def _nearest(gaussian: TiedGaussian, features: Tensor) -> Tensor:
    """``TiedGaussian.nearest``, of tensors with gradients."""
    centre, whitening, means = (
        features.new_tensor(part) for part in (gaussian.centre, gaussian.whitening, gaussian.means)
    )
    centred = features - centre
    points = centred @ whitening
    best = (means.square().sum(1) - 2 * points.detach() @ means.T).argmin(1)
    found = (points - means[best]).square().sum(1)
    if gaussian.rest.any():
        beside = centred - (points / whitening.square().sum(0)) @ whitening.T
        found = found + float(gaussian.rest[0]) * beside.square().sum(1)
    return found

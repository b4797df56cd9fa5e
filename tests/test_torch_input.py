"""Torch tensors go in as they are."""

import numpy as np
import pytest

import terrafirma
from terrafirma.errors import InvalidInput


def test_tensors_score_as_arrays(rng):
    torch = pytest.importorskip("torch")
    activations = rng.normal(size=(50, 70)).astype(np.float32)
    errors = rng.random(50) < 0.2
    expected = terrafirma.SubfunctionBound(rho=5.0).fit(activations, errors).unreliability(activations)
    est = terrafirma.SubfunctionBound(rho=5.0).fit(torch.relu(torch.tensor(activations)), torch.tensor(errors))
    np.testing.assert_array_equal(est.unreliability(torch.tensor(activations) > 0), expected)
    np.testing.assert_array_equal(est.unreliability(torch.tensor(activations).half()), expected)
    np.testing.assert_array_equal(est.unreliability(torch.tensor(activations, requires_grad=True)), expected)
    np.testing.assert_array_equal(est.unreliability(torch.tensor(activations).bfloat16()), expected)
    with pytest.raises(
        InvalidInput, match=r"Patterns must be dense. Got a sparse Tensor; call its to_dense\(\) first."
    ):
        est.unreliability(torch.tensor(activations).to_sparse())

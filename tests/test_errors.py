import pytest

from terrafirma import errors


def test_the_tree_is_as_drawn():
    for name in ("InvalidInput", "NotFitted", "BadFile"):
        assert issubclass(getattr(errors, name), errors.TerrafirmaError)
        assert issubclass(getattr(errors, name), ValueError)
        assert name in errors.__doc__
    assert issubclass(errors.MissingPackage, errors.TerrafirmaError)
    assert issubclass(errors.MissingPackage, ImportError)


def test_a_missing_package_names_its_extra():
    expected = r'no_such_package is needed .* Install it with: pip install "terrafirma\[torch\]".'
    with pytest.raises(errors.MissingPackage, match=expected):
        errors.require("no_such_package.module", extra="torch")

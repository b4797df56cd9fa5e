"""Everything that terrafirma raises, and the one door to optional packages.

::

    TerrafirmaError
    ├── InvalidInput        (ValueError)       an argument breaks a rule; nothing was changed
    │   └── UndefinedMetric                    a metric needs both wrong and right rows
    ├── NotFitted           (ValueError, AttributeError)   a fitted object is needed
    ├── BadFile             (ValueError)       a file is truncated, altered, of another kind or too new
    └── MissingPackage      (ImportError)      an optional package is not installed
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["BadFile", "InvalidInput", "MissingPackage", "NotFitted", "TerrafirmaError", "UndefinedMetric", "require"]


class TerrafirmaError(Exception):
    """The root of all errors that terrafirma raises on purpose."""


class InvalidInput(TerrafirmaError, ValueError):
    """An argument breaks a rule. The message names the rule, the value and the next step."""


class UndefinedMetric(InvalidInput):
    """A metric is not defined on this data: it needs both wrong and right rows, say."""


class NotFitted(TerrafirmaError, ValueError, AttributeError):
    """A method that needs a fitted object was called on one that is not."""


class BadFile(TerrafirmaError, ValueError):
    """A file is truncated, altered, of another kind, or written by a newer version."""


class MissingPackage(TerrafirmaError, ImportError):
    """An optional package is needed and not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional package, or say which extra brings it.

    >>> require("json", extra="plots").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingPackage(
            f'{package} is needed for this and is not installed. Install it with: pip install "terrafirma[{extra}]".'
        ) from error

"""Stoker feeds PyTorch training: fast enough that it never waits, never more than fits.

The public names below are loaded on first use. `import stoker` itself imports neither torch nor
numpy, so that the command line answers at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.errors import StokerError, WorkerDied
    from stoker.loader.dataloader import DataLoader
    from stoker.loader.elastic import ElasticSampler
    from stoker.loader.stats import LoaderStats
    from stoker.plan.knobs import Knobs

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022
    "__version__",
    "DataLoader",
    "ElasticSampler",
    "Knobs",
    "LoaderStats",
    "StokerError",
    "WorkerDied",
]

_HOME = {
    "DataLoader": "stoker.loader.dataloader",
    "ElasticSampler": "stoker.loader.elastic",
    "Knobs": "stoker.plan.knobs",
    "LoaderStats": "stoker.loader.stats",
    "StokerError": "stoker.errors",
    "WorkerDied": "stoker.errors",
}
_COMPANIONS = {"DataLoader": "stoker.integrations"}
"""Loaded with a name: frameworks that rebuild loaders must find ours prepared for it."""


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'stoker' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if name in _COMPANIONS:
        import_module(_COMPANIONS[name])
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

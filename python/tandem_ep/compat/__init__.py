"""Tandem under the names of other libraries.

A package named `deep_ep` comes with this one, out of sight of `import`: nothing that is installed
is shadowed by surprise. To let `import deep_ep` find it, either, before the first such import,

    import tandem_ep.compat
    tandem_ep.compat.install()

or without touching a program,

    PYTHONPATH=$(python -m tandem_ep.compat) python program.py

docs/from_deep_ep.md says what is the same and what is not.
"""

from __future__ import annotations

import pathlib
import sys


def path() -> str:
    """The folder that holds the packages; what PYTHONPATH wants."""
    return str(pathlib.Path(__file__).parent / "site")


def install() -> None:
    """Puts the folder first in sys.path. Raises ImportError if another deep_ep is imported."""
    loaded = sys.modules.get("deep_ep")
    if loaded is not None and not str(getattr(loaded, "__file__", "")).startswith(path()):
        raise ImportError(f"another deep_ep is imported already, from {loaded.__file__}")
    if path() not in sys.path:
        sys.path.insert(0, path())

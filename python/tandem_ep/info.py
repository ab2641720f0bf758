"""`python -m tandem_ep.info`: what this build can do on this machine. `--json` for machines."""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
from typing import Any

import tandem_ep

FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "cupy", "jax", "mpi4py")


def facts() -> dict[str, Any]:
    """Version, backends, limits and the frameworks that are installed (found, not imported)."""
    return {
        "version": tandem_ep.__version__,
        "python": platform.python_version(),
        "backends": {
            backend.name: {
                "built": backend.built,
                "usable": backend.usable,
                "why_not": backend.why_not,
                "details": list(backend.details),
            }
            for backend in tandem_ep.backends()
        },
        "limits": {
            "hidden": tandem_ep.MAX_HIDDEN,
            "topk": tandem_ep.MAX_TOPK,
            "ranks": tandem_ep.MAX_RANKS,
        },
        "frameworks": {name: importlib.util.find_spec(name) is not None for name in FRAMEWORKS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_ep.info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    if parser.parse_args().json:
        print(json.dumps(facts(), indent=2))
        return
    everything = facts()
    print(f"tandem_ep {everything['version']}, Python {everything['python']}")
    for name, backend in everything["backends"].items():
        state = "usable" if backend["usable"] else f"not usable: {backend['why_not']}"
        print(f"backend {name}: {state}")
        for detail in backend["details"]:
            print(f"  {detail}")
    limits = ", ".join(f"{name} up to {value}" for name, value in everything["limits"].items())
    print(f"limits: {limits}")
    found = [name for name, there in everything["frameworks"].items() if there]
    print(f"frameworks installed: {', '.join(found) or 'none'}")


if __name__ == "__main__":
    main()

"""The package as such: stubs, information, examples, and the code's neatness."""

from __future__ import annotations

import inspect
import json
import pathlib
import subprocess
import sys

import pytest

import tandem_ep
from tandem_ep import _tandem

PACKAGE = pathlib.Path(tandem_ep.__file__).parent
EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("*.py"))


def test_stub_is_the_module() -> None:
    """`_tandem.pyi` is what nanobind makes of the module. To write it anew:

    python -m nanobind.stubgen -m tandem_ep._tandem -o python/tandem_ep/_tandem.pyi
    """
    from nanobind.stubgen import StubGen

    generator = StubGen(_tandem)
    generator.put(_tandem)
    assert (PACKAGE / "_tandem.pyi").read_text() == generator.get()


def test_information_for_people_and_machines() -> None:
    run = [sys.executable, "-m", "tandem_ep.info"]
    text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert f"tandem_ep {tandem_ep.__version__}" in text and "backend cpu: usable" in text
    facts = json.loads(subprocess.run([*run, "--json"], capture_output=True, check=True).stdout)
    assert facts["backends"]["cpu"]["usable"] and facts["limits"]["topk"] == tandem_ep.MAX_TOPK
    assert facts["frameworks"]["numpy"]


def test_importing_brings_no_framework_along() -> None:
    program = (
        "import sys, tandem_ep; print([n for n in ('numpy', 'torch', 'jax') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [n for n in tandem_ep.__all__ if not n.startswith("MAX")])
def test_everything_public_is_documented(name: str) -> None:
    thing = getattr(tandem_ep, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing) and thing.__module__ in ("tandem_ep._buffer", "tandem_ep._results"):
        for member, value in vars(thing).items():
            if not member.startswith("_") and (callable(value) or isinstance(value, property)):
                assert inspect.getdoc(value), f"{name}.{member}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: pathlib.Path) -> None:
    # Standalone: at a port that is free, not at the one that torchrun takes by itself.
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *(launcher if "torch" in example.stem else []), example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout


def test_example_of_the_readme_is_the_one_that_runs() -> None:
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    example = (pathlib.Path(__file__).parents[1] / "examples" / "torch_layer.py").read_text()
    code = example.split('"""')[2].replace("  # fmt: skip", "").strip()
    assert f"```python\n{code}\n```" in readme

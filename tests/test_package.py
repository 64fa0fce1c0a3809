"""The package from outside: its public names, a light import, files that must agree, and the built wheel."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import types
import zipfile

import pytest

import ddtree_jax

ROOT = pathlib.Path(__file__).parents[1]
PUBLIC = {
    *("load", "generate", "stream", "SpeculativeAlgorithm", "Stats", "Result", "Chunk", "tree", "models"),
    *("CheckpointError", "UnsupportedRequestError", "InvariantError", "__version__", "Grammar", "make_mesh"),
    "debug_checks",
}


def python(code: str, **changes) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_and_no_others():
    assert set(ddtree_jax.__all__) == PUBLIC == set(dir(ddtree_jax))
    assert ddtree_jax.__all__ == sorted(ddtree_jax.__all__)
    for name in PUBLIC:
        assert getattr(ddtree_jax, name) is not None
    with pytest.raises(AttributeError, match="ddtree_jax.*generat"):
        _ = ddtree_jax.generat


def test_names_are_what_they_say():
    for name in ("load", "generate", "stream"):
        assert isinstance(getattr(ddtree_jax, name), types.FunctionType)
    for name in ("tree", "models"):
        assert isinstance(getattr(ddtree_jax, name), types.ModuleType)
    for error in (ddtree_jax.CheckpointError, ddtree_jax.UnsupportedRequestError, ddtree_jax.InvariantError):
        assert issubclass(error, Exception) and not issubclass(error, ValueError)


def test_no_module_takes_the_name_of_a_public_function_or_class():
    modules = {path.stem for path in (ROOT / "ddtree_jax").iterdir()}
    assert modules.isdisjoint(PUBLIC - {"tree", "models"})


def test_generate_stays_the_function_whatever_is_imported():
    code = """
import pathlib, importlib, types, ddtree_jax
for path in pathlib.Path(ddtree_jax.__path__[0]).iterdir():
    if path.suffix == ".py" and path.stem not in ("__init__", "__main__"):
        importlib.import_module(f"ddtree_jax.{path.stem}")
for name in ("load", "generate", "stream"):
    assert isinstance(getattr(ddtree_jax, name), types.FunctionType), name
"""
    python(code)


def test_import_loads_neither_jax_nor_flax():
    code = "import ddtree_jax, sys; print({'jax', 'flax', 'numpy', 'tokenizers'} & set(sys.modules))"
    assert python(code) == "set()\n"


def test_the_command_line_answers_help_and_bad_usage_without_jax():
    code = """
import sys
from ddtree_jax.cli import main
assert main(["generate", "--help"]) == 0
assert main(["generate", "x", "--no-such-flag"]) == 2
print("jax" in sys.modules)
"""
    assert python(code).endswith("False\n")


def run_module(*argv: str, **changes) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "ddtree_jax", *argv], cwd=ROOT, **changes)


def test_python_m_passes_the_exit_status_on():
    done = run_module("generate", "x", "--budget", "y", capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_reader_that_goes_away_is_no_traceback():
    read_end, write_end = os.pipe()
    os.close(read_end)
    # unbuffered, argparse itself would swallow the error
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = run_module("--help", stdout=write_end, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9-]+==[0-9][0-9a-z.]*", entry) for entry in entries), entries
    return dict(entry.split("==") for entry in entries)


def test_every_direct_dependency_is_pinned_within_its_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"cuda", "serving", "viz", "hub", "grammar", "dev"}
    for text in [*project["dependencies"], *(t for name in ("dev", "viz", "hub", "grammar") for t in extras[name])]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[requirement.name]), text


def test_pre_commit_checks_with_the_same_ruff():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"ruff==([0-9.]+)", text)) == {pins()["ruff"]}


def test_the_changelog_begins_with_unreleased():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] == "[Unreleased]"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_built_wheel_works_outside_the_checkout(tmp_path):
    """Builds the wheel, unpacks it elsewhere, and generates with the pair that it carries."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    top = {name.split("/")[0] for name in names}
    assert top == {"ddtree_jax", f"ddtree_jax-{ddtree_jax.__version__}.dist-info"}
    assert "ddtree_jax/demo/heldout.json" in names
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_jax", "generate", "def f(", "--max-new-tokens", "8", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert 1 <= len(json.loads(done.stdout)["token_ids"]) <= 8

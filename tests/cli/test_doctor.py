"""The doctor: what is missing has a reason and a remedy, and no failed check ends the report."""

import json
import pathlib
import re
import tomllib
import types

import jax
import pytest

import ddtree_jax
from ddtree_jax import CheckpointError, cli, doctor

EXTRAS_APART = ("cuda", "dev")  # one has lines of its own in the report, the other is not for users


@pytest.fixture
def installed(monkeypatch) -> dict[str, str | None]:
    """Package -> version; what is not in it is not installed."""
    versions: dict[str, str | None] = {package: "1.2.3" for package in (*doctor._PACKAGES, *doctor._OPTIONAL)}
    monkeypatch.setattr(doctor, "_version", versions.get)
    return versions


@pytest.fixture
def no_driver(monkeypatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.pathlib.Path, "exists", lambda path: False)


def by_name(report: doctor.Report) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in report.findings}


def test_on_this_machine_everything_asked_for_is_named(library):
    found = by_name(doctor.examine())
    for name in (
        "python",
        "jax",
        "jaxlib",
        "flax",
        "tokenizers",
        "backend",
        "device 0",
        "x64",
        "CUDA plugin",
    ):
        assert found[name].value
    assert found["jax"].value == jax.__version__
    assert found["backend"].value == "cpu"
    assert "GiB" in found["device 0"].value


def test_what_is_missing_has_a_reason_and_a_remedy(library, installed, no_driver):
    del installed["flax"], installed["matplotlib"]
    report = doctor.examine()
    found = by_name(report)
    assert found["flax"].status == "bad" and "pip install flax" in found["flax"].value
    assert found["matplotlib"].status == "info" and "ddtree-jax[viz]" in found["matplotlib"].value
    assert found["CUDA plugin"].status == "info" and "no NVIDIA driver" in found["CUDA plugin"].value
    assert not report.healthy
    for finding in report.findings:
        assert finding.status == "ok" or finding.value.startswith("not available: ")


def test_a_gpu_without_the_plugin_and_a_plugin_without_a_gpu(library, installed, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/bin/nvidia-smi")
    assert "ddtree-jax[cuda]" in by_name(doctor.examine())["CUDA plugin"].value
    installed["jax-cuda13-plugin"] = "0.12"
    assert "JAX did not start it" in by_name(doctor.examine())["CUDA plugin"].value


def test_a_gpu_that_jax_uses(library, installed, monkeypatch):
    installed["jax-cuda13-plugin"] = "0.12"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    found = by_name(doctor.examine())
    assert found["CUDA plugin"] == doctor.Finding("CUDA plugin", "jax-cuda13-plugin 0.12")
    assert "ddtree-jax[cuda]" in found["jax-triton"].value and "FP4" in found["jax-triton"].value
    assert found["jax-triton"].status == "info"
    installed["jax-triton"] = "0.4.1"
    found = by_name(doctor.examine())
    assert found["jax-triton"] == doctor.Finding("jax-triton", "0.4.1, for native FP4 products on Blackwell")


def test_every_package_of_every_extra_is_looked_for(library, installed, no_driver):
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {name: packages for name, packages in project["optional-dependencies"].items() if name not in EXTRAS_APART}
    listed = {re.match(r"[a-z-]+", package)[0]: name for name, packages in extras.items() for package in packages}
    assert listed == {package: extra for package, (extra, _) in doctor._OPTIONAL.items()}
    installed.clear()
    found = by_name(doctor.examine())
    for package, extra in listed.items():
        assert found[package].status == "info" and f"ddtree-jax[{extra}]" in found[package].value


@pytest.fixture
def demo_folder(monkeypatch, tmp_path):
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "weights").write_bytes(bytes(2**20))
    monkeypatch.setattr(ddtree_jax, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path / "demo"


def test_the_demo_pair_that_loads(library, demo_folder):
    finding = by_name(doctor.examine())["demo pair"]
    assert finding.status == "ok" and "1.0 MiB" in finding.value


def test_the_demo_pair_that_is_missing_or_does_not_load(library, demo_folder, monkeypatch):
    def broken(*args, **kwargs):
        raise CheckpointError("config.json:\n no key hidden_size")

    library.engine.drafter = None
    assert "no drafter" in by_name(doctor.examine())["demo pair"].value
    monkeypatch.setitem(vars(ddtree_jax), "load", broken)
    report = doctor.examine()
    finding = by_name(report)["demo pair"]
    assert finding.status == "bad" and "config.json: no key hidden_size" in finding.value
    assert not report.healthy
    monkeypatch.setattr(ddtree_jax, "__file__", str(demo_folder / "nowhere" / "__init__.py"))
    assert by_name(doctor.examine())["demo pair"].status == "bad"


def test_the_command(library, demo_folder, capsys, monkeypatch):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "demo pair" in out and out.splitlines()[-1].startswith("everything")
    assert cli.main(["doctor", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["healthy"] is True
    assert {"name": "backend", "value": "cpu", "status": "ok"} in values["findings"]
    bad = doctor.Report((doctor.Finding("x", "not available: y", "bad"),))
    monkeypatch.setattr(doctor, "examine", lambda: bad)
    assert cli.main(["doctor"]) == 1
    assert "missing" in capsys.readouterr().out


def test_a_device_with_memory_statistics(library, monkeypatch):
    device = types.SimpleNamespace(
        id=3,
        device_kind="NVIDIA H200",
        platform="gpu",
        memory_stats=lambda: {"bytes_limit": 4 * 2**30, "bytes_in_use": 2**30},
    )
    monkeypatch.setattr(jax, "devices", lambda: [device])
    value = by_name(doctor.examine())["device 3"].value
    assert "NVIDIA H200" in value and "4.0 GiB" in value and "1.0 in use" in value

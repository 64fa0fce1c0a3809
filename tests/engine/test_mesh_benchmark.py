"""`benchmarks/mesh.py` runs from end to end on virtual devices, and says what it must say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 900


def run(folder, *arguments):
    """(status, the JSON file, the Markdown file) of the command with two virtual devices."""
    file = folder / "mesh.json"
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "mesh.py"), "--small", "--json", str(file), *arguments],
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert file.exists(), done.stderr[-4000:]
    return done.returncode, json.loads(file.read_text()), file.with_suffix(".md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_slice_gives_the_same_tokens_over_two_devices(tmp_path):
    status, report, table = run(tmp_path, "--sections", "tokens", "--pairs", "slice", "--budget-s", str(SECONDS))
    section = report["sections"]["tokens"]
    assert status == 0 and report["ok"] and section["complete"], section["notes"]
    assert [row["mesh"] for row in section["rows"]] == ["1x1", "2x1", "1x2"]
    for row in section["rows"]:
        assert row["prompts"] == row["same"] == 4 and row["tokens"] == 4 * 24 and row["different"] > 1
        assert f"| slice | {row['mesh']} |" in table


def test_what_there_is_no_time_for_is_said(tmp_path):
    status, report, table = run(tmp_path, "--sections", "tokens,rounds", "--budget-s", "0")
    assert status == 0
    for name in ("tokens", "rounds"):
        section = report["sections"][name]
        assert section["rows"] == [] and not section["complete"] and "no time left" in section["notes"][0]
    assert table.count("not all was run") == 2

"""What `mesh.py` found, as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax

from ddtree_jax.pallas.kernel_report import package_versions

START = time.perf_counter()
TITLES = {
    "tokens": "Greedy tokens in float32 against one device",
    "acceptance": "Acceptance lengths in bfloat16 against one device, each round from one device's state",
    "rounds": "Time of a round in bfloat16, its launch included; kernel time by the profiler for each device",
    "load": "Loading a synthetic checkpoint: host memory that loading adds, against 2 x largest tensor + 1 GiB",
    "processes": "Two processes, one device each: greedy tokens in float32 against one device",
}


def say(text: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {text}", file=sys.stderr, flush=True)


@dataclasses.dataclass
class Section:
    """One table.

    Attributes:
      rows: column -> value, the same columns in each.
      notes: what was left out or failed, and what the rows amount to.
      ok: nothing that was looked at is other than it must be.
      complete: nothing was left out.
      seconds: that it took.
    """

    name: str
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    ok: bool = True
    complete: bool = True
    seconds: float = 0.0

    def add(self, *, ok: bool, **row: Any) -> None:
        self.rows.append({**row, "ok": bool(ok)})
        self.ok &= bool(ok)
        say(f"{self.name}: " + ", ".join(f"{key} {_cell(value)}" for key, value in row.items()))

    def left_out(self, text: str, *, wrong: bool = False) -> None:
        self.complete = False
        self.ok &= not wrong
        self.note(text)

    def note(self, text: str) -> None:
        self.notes.append(text)
        say(f"{self.name}: {text}")

    def heading(self) -> str:
        state = ("as it must be" if self.ok else "NOT as it must be") + ("" if self.complete else ", not all was run")
        return f"{TITLES[self.name]} ({state}; {self.seconds:.0f} s)"

    def cells(self) -> list[list[str]]:
        """The head and the rows."""
        if not self.rows:
            return []
        return [list(self.rows[0]), *([_cell(value) for value in row.values()] for row in self.rows)]

    def text(self) -> str:
        cells = self.cells()
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(f"{cell:<{n}}" for cell, n in zip(line, widths, strict=True)).rstrip() for line in cells]
        return "\n".join([self.heading(), *(f"    {line}" for line in (*lines, *self.notes)), ""])

    def markdown(self) -> str:
        lines = ["| " + " | ".join(line) + " |" for line in self.cells()]
        if lines:
            lines.insert(1, "|" + "---|" * len(self.rows[0]))
        return "\n".join([f"### {self.heading()}", "", *lines, "", *(f"- {note}" for note in self.notes), ""])


@dataclasses.dataclass
class MeshReport:
    """arguments: of the command."""

    arguments: dict[str, Any]
    sections: list[Section] = dataclasses.field(default_factory=list)

    def section(self, name: str) -> Section:
        self.sections.append(Section(name))
        return self.sections[-1]

    @property
    def ok(self) -> bool:
        return all(section.ok for section in self.sections)

    def title(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in package_versions().items())
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        flags = os.environ.get("XLA_FLAGS") or "none"
        return f"{self._devices()}, {versions}, XLA flags {flags}, kernels {self.arguments['kernels']}, {date}"

    def _devices(self) -> str:
        """Of this process, if it runs anything itself: asking takes the memory of the devices."""
        if not any(section.name in ("tokens", "acceptance", "rounds") for section in self.sections):
            return next((row["device"] for s in self.sections for row in s.rows if "device" in row), "devices unknown")
        return f"{jax.device_count()} x {jax.devices()[0].device_kind}"

    def to_dict(self) -> dict[str, Any]:
        sections = {section.name: dataclasses.asdict(section) for section in self.sections}
        return {"ok": self.ok, "title": self.title(), "arguments": self.arguments, "sections": sections}

    def markdown(self) -> str:
        return "\n".join([self.title(), "", *(section.markdown() for section in self.sections)])

    def write(self, file: str | os.PathLike[str]) -> tuple[pathlib.Path, pathlib.Path]:
        """Writes `file` as JSON, and the tables beside it with the ending .md."""
        path = pathlib.Path(file)
        table = path.with_suffix(".md")
        path.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        table.write_text(self.markdown())
        return path, table


def _cell(value: Any) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(one)}" for key, one in value.items())
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)

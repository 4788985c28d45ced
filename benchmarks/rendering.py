"""Make the table of results from the JSON files."""

import json
from pathlib import Path
from typing import Any

HEAD = """# Results

Written by `python -m benchmarks` from the JSON files beside it, which contain all measurements.
"""
LAST = "49b6f202"  # the commit that has the last programs of those figures that no program measures any more


def render(folder: Path) -> None:
    contents = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    programs = {path.stem for path in Path(__file__).parent.glob("*.py")}
    settled = [content["name"] for content in contents if content["name"] not in programs]
    notes = [f"No program measures these any more; commit {LAST} has the last ones: {', '.join(settled)}.\n"]
    parts = [HEAD, *notes * bool(settled), targets_table(contents), *(section(content) for content in contents)]
    (folder / "README.md").write_text("\n".join(parts))


def targets_table(contents: list[dict[str, Any]]) -> str:
    rows = [
        [content["name"], row["what"], shown(row["value"], row["unit"]), bound(row), verdict(row["met"])]
        for content in contents
        for row in content["targets"]
    ]
    return table(["benchmark", "figure", "measured", "target", "met"], rows)


def section(content: dict[str, Any]) -> str:
    """Return the section of a benchmark: description, machine, and statistics of all series."""
    machine, packages = content["machine"], content["versions"]
    warning = "**Quick settings: these figures mean nothing.**\n\n" if content["quick"] else ""
    instructions = ", ".join(machine["bf16_instructions"]) or "no bf16 instructions"
    rows = [
        [label, str(row["n"]), *(shown(row[key], row["unit"]) for key in ("median", "mean", "stdev", "min", "max"))]
        for label, row in content["series"].items()
    ]
    return "\n".join(
        [
            f"## {content['name']}\n",
            f"{warning}{content['description']}\n",
            f"{content['date']}, {content['seconds']:.0f} s in all; {machine['cpu']}, {machine['cores']} cores, "
            f"{machine['memory_gib']} GiB, {instructions}, load average before: {content['load_average_before']:.2f}; "
            + ", ".join(f"{name} {number}" for name, number in packages.items())
            + ".\n",
            "Settings: " + ", ".join(f"{key} {value}" for key, value in content["settings"].items()) + ".\n",
            *(f"- {note}" for note in content.get("notes", [])),
            table(["series", "n", "median", "mean", "standard deviation", "min", "max"], rows),
        ]
    )


def bound(row: dict[str, Any]) -> str:
    if row["at_least"] is not None:
        return f"at least {shown(row['at_least'], row['unit'])}"
    if row["at_most"] is not None:
        return f"at most {shown(row['at_most'], row['unit'])}"
    return "reported"


def verdict(met: bool | None) -> str:
    return {True: "yes", False: "**no**", None: ""}[met]


def shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{100 * value:.2f} %"
    if unit == "x":
        return f"{value:.3f}x"
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3f} {unit}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

"""Writes the tables and recipes of docs/ from the code: ``python tests/helpers/document_tables.py``."""

import ast
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from cli import ROOT

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.settings import load_variables_file, read_variable_table

TABLE = re.compile(r"(<!-- \w+: written by .*?-->\n)(.*?)(<!-- end -->)", re.DOTALL)


def hyperparameter_table() -> str:
    """Return name, default, range and help text of every hyperparameter, as Markdown."""
    lines = ["| name | default | values | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(Hyperparameters):
        default = str(field.default).lower() if field.type is bool else str(field.default)
        cells = [f"`{field.name}`", default or "(empty)", format_rule(field), field.metadata["doc"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def format_rule(field: dataclasses.Field) -> str:
    """Return the values that a hyperparameter may have."""
    rule = field.metadata
    if rule["choices"]:
        return ", ".join(rule["choices"]) + (", or own" if rule["own"] else "")
    if field.type in (bool, str):
        return "true, false" if field.type is bool else "text"
    signs = {"at_least": "≥", "above": ">", "at_most": "≤", "below": "<"}
    bounds = [f"{sign} {rule[key]:g}" for key, sign in signs.items() if key in rule]
    return ", ".join([field.type.__name__, *bounds])


def variable_table() -> str:
    """Return the table of variables, and a sentence on internal variables, as Markdown."""
    lines = ["| variable | default | where | meaning |", "|---|---|---|---|"]
    for variable in read_variable_table().values():
        default = variable.default or "(empty)"
        default = default if default.startswith("(") else f"`{default}`"
        lines.append(f"| `{variable.name}` | {default} | {variable.where} | {variable.meaning} |")
    internal = "; ".join(f"`{name}` ({meaning})" for name, meaning in load_variables_file()["internal"].items())
    return "\n".join([*lines, "", f"Internal, and not to be set: {internal}.", ""])


def data_recipes() -> str:
    """Return docstring and beginning of each recipe for a data library, as Markdown."""
    sections = []
    for recipe in sorted((ROOT / "examples/libraries").glob("data_*.py")):
        _, told, code = recipe.read_text().split('"""', 2)
        title, _, text = told.strip().partition("\n\n")
        code = code.partition("\n\n\ndef write(")[0].strip()
        sections.append(f"## {title.rstrip('.')}\n\n{text}\n\n```python\n# {recipe.name}\n{code}\n```\n")
    return "\n".join(sections)


def model_recipes() -> str:
    """Return each recipe for a library of models, as Markdown: the docstring, with the code after the command."""
    sections = []
    for recipe in sorted((ROOT / "examples/libraries").glob("model_*.py")):
        text = recipe.read_text()
        docstring = ast.get_docstring(ast.parse(text)) or ""
        title, command, *remarks = docstring.split("\n\n")
        name, _, what = title.partition(": ")
        code = text.split('"""', 2)[2].partition("\n# What it is tried with.\n")[0]
        parts = [f"## {name}", f"{what[0].upper()}{what[1:]}", f"```\n{command}\n```"]
        link = f"[{recipe.name}](../examples/libraries/{recipe.name})"
        sections += [*parts, *remarks, f"{link}:", f"```python\n{re.sub('  # noqa.*', '', code).strip()}\n```"]
    return "\n\n".join(sections) + "\n"


PAGES: dict[Path, Callable[[], str]] = {
    ROOT / "docs/hyperparameters.md": hyperparameter_table,
    ROOT / "docs/configuration.md": variable_table,
    ROOT / "docs/data-libraries.md": data_recipes,
    ROOT / "docs/model-libraries.md": model_recipes,
}

if __name__ == "__main__":
    for page, table in PAGES.items():
        page.write_text(TABLE.sub(lambda found, table=table: found[1] + table() + found[3], page.read_text()))

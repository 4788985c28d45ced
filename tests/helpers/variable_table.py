"""The table of variables in docs/: ``python tests/helpers/variable_table.py`` writes it."""

import re

from cli import ROOT

from flyte_ddp.settings import load_variables_file, read_variable_table

CONFIGURATION = ROOT / "docs" / "configuration.md"
WRITTEN = re.compile(r"(<!-- variables:.*?-->\n).*?(<!-- end -->)", re.DOTALL)


def text() -> str:
    """The table, and a line on those that nobody sets."""
    lines = ["| variable | default | where | meaning |", "|---|---|---|---|"]
    for variable in read_variable_table().values():
        default = variable.default or "(empty)"
        default = default if default.startswith("(") else f"`{default}`"
        lines.append(f"| `{variable.name}` | {default} | {variable.where} | {variable.meaning} |")
    internal = "; ".join(f"`{name}` ({meaning})" for name, meaning in load_variables_file()["internal"].items())
    return "\n".join([*lines, "", f"Internal, and not to be set: {internal}.", ""])


if __name__ == "__main__":
    CONFIGURATION.write_text(WRITTEN.sub(lambda found: found[1] + text() + found[2], CONFIGURATION.read_text()))

"""The documents: links lead to something, files and benchmarks that they name are there, pages have their form."""

import re
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from cli import ROOT

DESIGN = ROOT / "docs" / "design"
PAGES = sorted(path for path in DESIGN.glob("*.md") if path.name != "README.md")
FOLDERS = [ROOT / folder for folder in ("docs", "deploy", "benchmarks", "examples")]
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:flyte_ddp|examples|tasks|workflows|tests|benchmarks|deploy|docs|config)/[\w./-]*)`")
IMPORT = re.compile(r"^from (flyte_ddp[\w.]*) import ([\w, ]+)$", re.MULTILINE)
BENCHMARK = re.compile(r"python -m benchmarks (\w+)")


def headings(path: Path) -> list[str]:
    """Of all levels, without the marks, in their order."""
    return re.findall(r"^#+ +(.+?) *$", FENCED.sub("", path.read_text()), re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings: lower case, no punctuation, hyphens for spaces, numbers for what comes again."""
    found: Counter[str] = Counter()
    names = set()
    for heading in headings(path):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] += 1
    return names


def test_relative_links_lead_to_files_and_headings() -> None:
    broken, seen = [], 0
    for path in DOCUMENTS:
        for link in LINK.findall(CODE.sub("", FENCED.sub("", path.read_text()))):
            if re.match(r"[a-z]+:", link):
                continue
            seen += 1
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert not broken
    assert seen > 60


def test_files_and_benchmarks_that_are_named_are_there() -> None:
    for path in (ROOT / "CONTRIBUTING.md", *PAGES):
        text = path.read_text()
        named = [*NAMED_FILE.findall(text), *(f"benchmarks/{name}.py" for name in BENCHMARK.findall(text))]
        assert [name for name in named if not (ROOT / name).exists()] == [], path


def test_names_that_programs_of_the_documents_import_are_there() -> None:
    programs = "".join(block for path in DOCUMENTS for block in FENCED.findall(path.read_text()))
    imports = {(module, name.strip()) for module, names in IMPORT.findall(programs) for name in names.split(",")}
    assert len(imports) > 15
    for module, name in imports:
        assert hasattr(import_module(module), name) or find_spec(f"{module}.{name}"), f"from {module} import {name}"


def test_each_design_page_has_its_form_and_is_in_the_index_by_its_title() -> None:
    assert PAGES
    for path in PAGES:
        assert headings(path)[1:] == ["Question", "Choice", "Measurement"], path
    lines = re.findall(r"^- \[(.+)\]\((.+)\)$", (DESIGN / "README.md").read_text(), re.MULTILINE)
    assert sorted((name, title) for title, name in lines) == [(path.name, headings(path)[0]) for path in PAGES]

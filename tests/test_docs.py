"""The documents: links lead to something, files and benchmarks that they name are there, pages have their form."""

import re
from pathlib import Path

from cli import ROOT

DESIGN = ROOT / "docs" / "design"
PAGES = sorted(path for path in DESIGN.glob("*.md") if path.name != "README.md")
DOCUMENTS = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "deploy", "benchmarks") for path in (ROOT / folder).rglob("*.md")),
]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:flyte_ddp|tasks|workflows|tests|benchmarks|deploy|docs|config)/[\w./-]*)`")
BENCHMARK = re.compile(r"python -m benchmarks (\w+)")


def headings(path: Path) -> list[str]:
    """Of all levels, without the marks, in their order."""
    return re.findall(r"^#+ +(.+?) *$", FENCED.sub("", path.read_text()), re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """What GitHub calls the headings: lower case, no punctuation, hyphens for spaces, numbers for what comes again."""
    found: dict[str, int] = {}
    names = set()
    for heading in headings(path):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
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
    missing = []
    for path in (ROOT / "CONTRIBUTING.md", *PAGES):
        text = path.read_text()
        named = [*NAMED_FILE.findall(text), *(f"benchmarks/{name}.py" for name in BENCHMARK.findall(text))]
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in named if not (ROOT / name).exists()]
    assert not missing


def test_each_design_page_is_a_question_a_choice_and_a_measurement() -> None:
    other = [path.name for path in PAGES if headings(path)[1:] != ["Question", "Choice", "Measurement"]]
    assert PAGES
    assert not other


def test_the_index_has_each_page_once_by_its_title() -> None:
    lines = re.findall(r"^- \[(.+)\]\((.+)\)$", (DESIGN / "README.md").read_text(), re.MULTILINE)
    assert sorted((name, title) for title, name in lines) == [(path.name, headings(path)[0]) for path in PAGES]

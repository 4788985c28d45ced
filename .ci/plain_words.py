#!/usr/bin/env python3
"""Check the shapes of sentences in docstrings and documents, which make a stranger read a sentence twice.

Each sentence over a limit is listed with --list. The exit code is 1 if a share in LIMITS is exceeded.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("flyte_ddp", "tasks", "workflows", "flytekitplugins")
# Shares of sentences that may have a shape; "any" is a sentence with one of the shapes.
LIMITS = {"docstrings": {"any": 0.05, "semicolon": 0.0, "pronouns": 0.02}, "documents": {"any": 0.05}}
WORDS = {"docstrings": 25, "documents": 30}  # most words of a sentence
FIRST_WORDS = 20  # of a docstring's first sentence
PRONOUNS = {"docstrings": 1, "documents": 2}  # most of a sentence
PRONOUN = re.compile(
    r"\b(it|its|they|them|their|these|those|ones?|such|which|what|that(?= (?:is|was|has|are|of|by|in|with|to)\b))\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"``[^`]*``|`[^`]*`")


def main() -> int:
    """Print the shares, and return the exit code."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    generated = "benchmarks/results/README.md"
    sources = [ROOT / name for name in tracked if name.startswith(CODE) and name.endswith(".py")]
    documents = [ROOT / name for name in tracked if name.endswith(".md") and name != generated]
    failed = False
    for kind, files, read in (("docstrings", sources, read_docstrings), ("documents", documents, read_document)):
        total, counts = 0, dict.fromkeys(("any", "semicolon", "pronouns"), 0)
        for file in files:
            for line, sentence, is_first in read(file):
                total += 1
                shapes = find_shapes(sentence, kind, is_first=is_first)
                for shape in {"any", *shapes} & counts.keys() if shapes else ():
                    counts[shape] += 1
                if shapes and "--list" in sys.argv:
                    print(f"{file.relative_to(ROOT)}:{line}: {', '.join(shapes)}: {sentence}")
        for shape, limit in LIMITS[kind].items():
            share = counts[shape] / max(1, total)
            failed |= share > limit
            print(f"{kind}, {shape}: {counts[shape]} of {total:,} sentences, {share:.1%} (at most {limit:.1%})")
    if failed:
        print(
            "too many sentences are read twice: `.ci/plain_words.py --list` lists them; CONTRIBUTING.md has the rules"
        )
    return int(failed)


def find_shapes(sentence: str, kind: str, *, is_first: bool) -> list[str]:
    """Return the names of a sentence's shapes that are read twice."""
    words = len(re.findall(r"[A-Za-z0-9][\w'-]*", sentence))
    docstring = kind == "docstrings"
    most = FIRST_WORDS if docstring and is_first else WORDS[kind]
    shapes = [f"{words} words"] if words > most else []
    shapes += ["semicolon"] if docstring and ";" in sentence else []
    return shapes + (["pronouns"] if len(PRONOUN.findall(sentence)) > PRONOUNS[kind] else [])


def read_docstrings(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, sentence, and whether the sentence is the first, of each docstring in a Python file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            for number, sentence in enumerate(split_sentences(text.partition("\n\nArgs:")[0])):
                yield getattr(node, "lineno", 1), sentence, number == 0


def read_document(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line and sentence of the prose of a Markdown file: no code, tables, headings or pictures."""
    without_code = re.sub(r"```.*?```", lambda code: "\n" * code[0].count("\n"), path.read_text(), flags=re.DOTALL)
    line = 1
    for block in re.split(r"\n\s*\n", without_code):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        if not re.match(r"\s*(\||#|<!--|!)", block):
            for item in re.split(r"^\s*(?:[-*]|\d+\.) ", text, flags=re.MULTILINE):
                for sentence in split_sentences(item):
                    yield line, sentence, False
        line += block.count("\n") + 2


def split_sentences(text: str) -> list[str]:
    plain = QUOTED.sub("X", re.sub(r"\s+", " ", text.strip()))
    return [sentence for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`(*])", plain) if sentence]


if __name__ == "__main__":
    sys.exit(main())

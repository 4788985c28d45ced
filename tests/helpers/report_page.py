"""Artificial run folders for the tests of the report, and a reader of the report's HTML."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from flyte_ddp.config import Hyperparameters
from flyte_ddp.core.text.sections import Confusions, Pictures, encode_sections

Record = dict[str, Any]
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """An HTML page as a list of (tag, attributes, text inside)."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {[tag for tag, _, _ in self.open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, {name: value or "" for name, value in attrs}, list[str]())
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, inside in self.open:
            inside.append(data)

    def texts(self, tag: str, **attributes: str) -> list[str]:
        """Return the text inside each element of a tag that has these attributes."""
        return [
            "".join(inside).strip()
            for name, found, inside in self.elements
            if name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
        ]

    def attributes(self, name: str) -> list[str]:
        return [found[name] for _, found, _ in self.elements if name in found]

    def tiles(self) -> dict[str, tuple[str, str]]:
        """Return value and detail of each tile of the headline, by label."""
        return {label: (value, "".join(detail)) for label, value, *detail in self.pieces("tile")}

    def pieces(self, style: str) -> list[list[str]]:
        """Return the texts inside each element of a class."""
        return [inside for _, found, inside in self.elements if found.get("class") == style]

    def rows(self) -> list[list[str]]:
        """Return all table rows as lists of cells."""
        return [inside for tag, _, inside in self.elements if tag == "tr"]


def records(
    *, epochs: int = 3, steps: int = 100, every: int = 10, classes: list[str] | None = None, validation: bool = True
) -> list[Record]:
    """Return the records of a run. All figures differ."""
    hp = Hyperparameters(dataset="mnist", epochs=epochs, num_ranks=2, learning_rate=0.25)
    start = {
        "kind": "start",
        "time": 1_700_000_000.0,
        "hyperparameters": hp.to_dict(),
        "num_ranks": 2,
        "num_nodes": 1,
        "device": "cpu",
        "backend": "gloo",
        "strategy": "shared_memory",
        "precision": "bf16",
        "threads_per_rank": 1,
        "parameters": 431_080,
        "training_samples": 54_000,
        "validation_samples": 6_000 if validation else 0,
        "test_samples": 10_000,
        "steps": epochs * steps,
        "classes": classes or [f"class {k}" for k in range(10)],
    }
    result: list[Record] = [start]
    for step in range(every, epochs * steps + 1, every):
        train = {"kind": "train", "time": 1_700_000_000.0 + step / 10, "epoch": (step - 1) // steps, "step": step}
        result.append({**train, "loss": 2.0 / step, "learning_rate": 0.1, "samples_per_second": 17_000.0 + step})
        if step % steps == 0:
            epoch = step // steps
            held_out = {"validation_loss": 0.5 / epoch, "validation_accuracy": 0.8 + epoch / 1000} if validation else {}
            tested = {"test_loss": 0.75 / epoch, "test_accuracy": 0.7 + epoch / 1000}
            done = {"kind": "evaluation", "epoch": epoch, "step": step, "time": 0.0}
            result.append({**done, **held_out, **tested})
    seconds = {"data": 1.0, "forward_backward": 5.0, "communication": 2.0, "evaluation": 1.5, "other": 0.5}
    end = {"kind": "end", "time": 1_700_000_200.0, "test_accuracy": 0.9137, "test_loss": 0.2468, "stopped": ""}
    return [*result, {**end, "seconds": {**seconds, "total": 10.0}, "samples_per_second": 16_543.2}]


def write_run(folder: Path, lines: list[Record], confusion: np.ndarray[Any, Any] | None = None) -> Path:
    """Write a run folder with these records, and with predictions if a confusion matrix is given. Return the folder."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if confusion is not None:
        classes = len(confusion)
        truth = np.array([0, 1, 0, 1, 0])
        guess = np.array([0, 0, 1, 0, classes - 1])
        scores = np.array((0.9, 0.8, 0.97, 0.86, 0.75), dtype=np.float32)
        images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8)
        counts = np.column_stack([np.argwhere(confusion), confusion[confusion > 0]])
        names = lines[0]["classes"]
        sections = [Confusions(names, counts.tolist()), Pictures("Worst mistakes", "of them", [71, 52, 33])]
        arrays: dict[str, Any] = {"images": images, "score": scores, "sections": np.array(encode_sections(sections))}
        arrays |= {name: np.array([names[k] for k in of]) for name, of in (("truth", truth), ("prediction", guess))}
        arrays |= {"index": np.array([0, 1, 71, 52, 33]), "table_rows": np.array(2)}
        np.savez(folder / "predictions.npz", **arrays, loss=np.array([0, 0, 3, 2, 1], dtype=np.float32))
    return folder


def matrix(classes: int) -> np.ndarray[Any, Any]:
    """Return a confusion matrix without two equal rows."""
    counts = np.random.default_rng(1).integers(0, 3, (classes, classes)) + np.diag(np.arange(50, 50 + classes))
    counts[1, 0] = 40
    return counts

"""The values with which the report's template shows an objective's sections: charts as SVG, numbers as texts."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flyte_ddp.report.charts import DRAWINGS
from flyte_ddp.report.class_colors import class_colors
from flyte_ddp.report.figures import Picture, confusion_section
from flyte_ddp.text.formatting import format_column
from flyte_ddp.text.sections import Chart, Confusions, Pictures, Section, Table


def list_section_values(
    sections: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the template's values of each section; charts in a row with one title are one section."""

    def group_of(section: Section) -> Hashable:
        return section.title if isinstance(section, Chart) else id(section)

    for _, grouped in groupby(sections, group_of):
        group = [*grouped]
        try:
            yield _describe_group(group, pictures, classes)
        except Exception as error:  # an own objective's numbers may be any; they must not cost a training that is done
            title = getattr(group[0], "title", "Confusions")
            yield {"title": title, "text": f"This section could not be drawn ({type(error).__name__}: {error})."}


def _describe_group(
    group: Sequence[Section], pictures: Mapping[int, Picture], classes: Sequence[str]
) -> dict[str, Any]:
    section = group[0]
    if isinstance(section, Confusions):
        counts = np.array(section.counts, dtype=np.int64).reshape(-1, 3)
        return {"confusion": confusion_section(counts, section.classes), "classes": len(section.classes)}
    values: dict[str, Any] = {"title": section.title, "text": section.text}
    if isinstance(section, Pictures):
        values["pictures"] = [pictures[sample] for sample in section.samples if sample in pictures]
        if any(picture.masks for picture in values["pictures"]):
            values["legend"] = [*zip(classes, class_colors(len(classes)), strict=True)]
    elif isinstance(section, Table):
        columns = [*zip(*section.rows, strict=True)]
        texts = [any(isinstance(cell, str) for cell in column) for column in columns]
        values |= {"header": section.header, "numeric": [place for place, text in enumerate(texts) if not text]}
        values["rows"] = [*zip(*map(format_column, columns), strict=True)]
    else:
        values["charts"] = [(each.name, DRAWINGS[type(each)](each)) for each in group if isinstance(each, Chart)]
    return values

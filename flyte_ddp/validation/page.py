"""Render the page that shows a data set's profile."""

from flyte_ddp.formatting import format_count
from flyte_ddp.report.page import render_template
from flyte_ddp.validation.profile import DataProfile


def render_profile(profile: DataProfile, dataset: str, warnings: list[str]) -> str:
    """Return the HTML page of a data set's profile, in one file. It begins with the warnings."""
    facts = [("Warning", warning) for warning in warnings]
    for name, split in {"Training": profile.training, "Test": profile.test}.items():
        numbers = sorted(split.labels.values())
        classes = f"{len(numbers):,} classes of {numbers[0]:,} to {numbers[-1]:,}"
        modes = ", ".join(f"{mode} {number:,}" for mode, number in split.modes.items())
        unusable = f"; {split.undecodable:,} cannot be decoded" if split.undecodable else ""
        facts.append((name, f"{format_count(split.samples, 'sample')} in {classes}; {modes}{unusable}"))
    facts.append(("Test samples that are training samples, too", f"{profile.duplicates:,}"))
    facts.append(("Samples with equal pixels and different labels", f"{profile.conflicts:,}"))
    return render_template("preview.html", title=dataset, heading="What the data set is like", facts=facts)

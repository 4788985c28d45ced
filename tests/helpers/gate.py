"""Models that are judged against the champion of a registry."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training_runs import QUIET

from flyte_ddp.predict.sample_columns import Reference
from flyte_ddp.release.judge import judge_challenger
from flyte_ddp.release.judgement import Judgement
from flyte_ddp.release.page import write_verdict_page
from flyte_ddp.release.policy import Policy
from flyte_ddp.release.promotion import REFERENCE, apply_verdict, store_version
from flyte_ddp.release.registry import Registry
from flyte_ddp.release.samples import SAMPLES
from flyte_ddp.run import Result

DEFAULT = Policy()


@dataclass
class Gate:
    """A registry, and models to judge against the champion: runs by name, or folders with a model's files."""

    runs: Mapping[str, Result]
    registry: Registry
    data: Path
    folder: Path

    def judge(self, model: str | Path, data: Path | None = None, policy: Policy = DEFAULT, **options: Any) -> Judgement:
        """Judge a model without storing or promoting the model. Only looks are counted."""
        folder = self.runs[model].run_folder if isinstance(model, str) else model
        given = {"registry": self.registry, "settings": QUIET, **options}
        return judge_challenger(folder / "model.pt", folder / "model.json", data or self.data, policy=policy, **given)

    def release(self, model: str | Path, data: Path | None = None, policy: Policy = DEFAULT) -> Judgement:
        """Judge a model, and apply the verdict."""
        found = self.judge(model, data, policy)
        page = write_verdict_page(found, self.registry.name, self.folder / "page.html")
        beside = {page.name: page}
        if found.full_evaluation is not None:
            beside[SAMPLES] = self.folder / SAMPLES
            found.identify_samples().write(beside[SAMPLES])
        if found.full_evaluation is not None and found.full_evaluation.monitoring_columns:
            beside[REFERENCE] = self.folder / REFERENCE
            Reference(found.full_evaluation.monitoring_columns, found.full_evaluation.columns).write_file(
                beside[REFERENCE]
            )
        version = store_version(self.registry, *found.model.files, found.verdict, beside)
        apply_verdict(self.registry, version, found.verdict, by="p/d/e")
        return found

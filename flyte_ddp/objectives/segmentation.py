"""Objective with one class for each pixel: cross-entropy, IoU and pixel accuracy."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from flyte_ddp.catalog import SETTINGS_OF_OBJECTIVES
from flyte_ddp.core.objectives.objective import HIGHER, Columns, Objective, list_largest_losses, overrides
from flyte_ddp.core.objectives.table_columns import TableColumns
from flyte_ddp.core.samples.leaves import IGNORED
from flyte_ddp.core.text.formatting import join_first
from flyte_ddp.core.text.sections import Pictures, Section, Table
from flyte_ddp.objectives.class_columns import make_top_columns, make_unique_column_names
from flyte_ddp.objectives.requirements import check_output_shape, check_target_type, check_target_values


class Segmentation(Objective):
    """Objective for masks of class numbers [n, H, W] as targets, and logits [n, classes, H, W] as outputs.

    The target of an ignored pixel is 255. A model may also return a dict with the logits as ``out``, as torchvision's
    segmentation models do.
    """

    measures: Mapping[str, str] = {"miou": HIGHER, "pixel_accuracy": HIGHER}
    used_hyperparameters = frozenset(SETTINGS_OF_OBJECTIVES["segmentation"])
    loss_unit = "cross-entropy (nats)"

    def check_targets(self, targets: NDArray[Any]) -> None:
        """Raise UserError unless ``targets`` are masks [samples, height, width] of class numbers and 255 (ignored)."""
        rule = "a mask [height, width] of class numbers for each sample"
        check_target_type("segmentation", targets, (3,), "iu", rule)
        rule = f"0..{self.outputs - 1} with {self.outputs} classes, or {IGNORED} for ignored pixels"
        check_target_values(
            "segmentation", targets, lambda part: (part == IGNORED) | ((part >= 0) & (part < self.outputs)), rule
        )

    def check_outputs(self, model: str, outputs: Any, targets: Tensor) -> None:
        """Raise UserError unless the logits have the shape [samples, classes, height, width] of the masks.

        ``model`` is named in the error.
        """
        shape = len(targets), self.outputs, *targets.shape[1:]
        fix = "upsample to the mask's size, and size its last layer by num_classes"
        check_output_shape(model, extract_mask_logits(outputs), shape, "(samples, classes, height, width)", fix)

    def weights(self, targets: Tensor) -> Tensor:
        """Return the weight of each pixel: 0 for ignored pixels, else the weight of the pixel's class (default 1)."""
        counts = targets != IGNORED
        if self.class_weights is None:
            return counts.to(torch.float32)
        return self.class_weights_at(targets.device)[torch.where(counts, targets, 0).long()] * counts

    def losses(self, outputs: Any, targets: Tensor) -> Tensor:
        # Uses rows of pixels, because the loss of images has no deterministic form on a GPU.
        """Return the cross-entropy of each pixel, [n, H, W]. Ignored pixels have a loss of 0."""
        rows = functional.log_softmax(extract_mask_logits(outputs), 1).movedim(1, -1).flatten(0, -2)
        losses = functional.nll_loss(rows, targets.flatten().long(), reduction="none", ignore_index=IGNORED)
        return losses.view(targets.shape)

    def columns(self, outputs: Any, targets: Tensor) -> dict[str, Tensor]:
        """Return pixel counts of each sample and class, [n, classes], without ignored pixels.

        The column ``true`` counts the targets, and ``predicted`` counts the outputs. The column ``correct`` counts the
        pixels where both agree.
        """
        classes = self.outputs
        predicted = torch.where(targets == IGNORED, classes, extract_mask_logits(outputs).argmax(1))
        truth = torch.where(targets == IGNORED, classes, targets.long())
        return {
            "correct": count_pixels(torch.where(predicted == truth, truth, classes), classes),
            "predicted": count_pixels(predicted, classes),
            "true": count_pixels(truth, classes),
        }

    def measure(self, columns: Columns) -> dict[str, float]:
        """Return ``miou`` and ``pixel_accuracy``, over the pixels of all samples together.

        ``miou`` is the mean IoU of the classes that occur in truth or predictions. ``pixel_accuracy`` is the share of
        correct pixels. If no pixel counts, both are NaN.
        """
        defined = compute_iou_by_class(columns)
        defined = defined[~defined.isnan()]
        pixels = columns["true"].sum().item()
        accuracy = columns["correct"].sum().item() / pixels if pixels else float("nan")
        return {"miou": defined.mean().item() if len(defined) else float("nan"), "pixel_accuracy": accuracy}

    def loss_of_best_constant(self, columns: Columns) -> float | None:
        """Return the loss of the best constant prediction: the entropy of the classes' shares of all pixels.

        With class weights, or if a subclass overrides losses, weights or columns, returns None.
        """
        if overrides(self, Segmentation, "losses", "weights", "columns") or self.class_weights is not None:
            return None
        shares = columns["true"].sum(0) / columns["true"].sum().clamp(min=1)
        return float(-torch.special.xlogy(shares, shares).sum())

    def masks(self, outputs: Any) -> Tensor:
        found: Tensor = extract_mask_logits(outputs).argmax(1)
        return found

    def answers(self, outputs: Any) -> TableColumns:
        return self.make_share_columns("share", self.masks(outputs))

    def top_answers(self, outputs: Any, number: int) -> TableColumns:
        """Return ``top_<rank>`` and ``share_top_<rank>`` of the classes with the most pixels."""
        return self.make_top_share_columns("", self.masks(outputs), number)

    def truths(self, targets: Tensor) -> TableColumns:
        return self.make_share_columns("truth", self.replace_ignored(targets))

    def top_truths(self, targets: Tensor, number: int) -> TableColumns:
        """Return ``truth_top_<rank>`` and ``truth_share_top_<rank>`` of the classes with the most pixels."""
        return self.make_top_share_columns("truth_", self.replace_ignored(targets), number)

    def replace_ignored(self, targets: Tensor) -> Tensor:
        return torch.where(targets == IGNORED, self.outputs, targets.long())

    def make_share_columns(self, prefix: str, masks: Tensor) -> TableColumns:
        names = make_unique_column_names(prefix, self.facts.classes)
        return dict(zip(names, self.measure_shares(masks).T.tolist(), strict=True))

    def make_top_share_columns(self, prefix: str, masks: Tensor, number: int) -> TableColumns:
        """Return columns with name and share of the ``number`` classes with the most pixels in each mask.

        ``number`` is capped at the number of classes. The columns' names begin with ``prefix``. Where fewer classes
        have pixels, the name is "" and the share is NaN.
        """
        shares, none = self.measure_shares(masks).nan_to_num(nan=0.0), self.outputs
        shown = shares.topk(min(number, none))
        ranks = shown.indices.where(shown.values > 0, none)
        shares = functional.pad(shares, (0, 1), value=torch.nan)
        return make_top_columns(prefix, "share", (*self.facts.classes, ""), shares, ranks)

    def measure_shares(self, masks: Tensor) -> Tensor:
        counts = count_pixels(masks, self.outputs).double().cpu()
        return counts / counts.sum(1, keepdim=True)

    def sections(self, columns: Columns) -> list[Section]:
        """Return sections of the report: a table of IoU and pixels by class, and pictures with the largest losses."""
        correct, predicted, true = (columns[name].sum(0).long().tolist() for name in ("correct", "predicted", "true"))
        found = compute_iou_by_class(columns).tolist()
        counts = zip(true, predicted, correct, strict=True)
        rows = [[name, iou, *pixels] for name, iou, pixels in zip(self.facts.classes, found, counts, strict=True)]
        text = (
            "All test samples together, without ignored pixels. The IoU of a class is its number of correct pixels "
            "divided by the number of pixels with this class in the truth or in the prediction."
        )
        absent = [str(name) for name, _, *pixels in rows if not any(pixels)]
        if absent:
            text += f" Not in the mean IoU, because the classes do not occur: {join_first(absent)}."
        header = ("Class", "IoU", "Pixels in truth", "Predicted", "Correct")
        worst = "The test samples with the largest loss. Ignored pixels are grey."
        return [Table("Classes", text, header, rows), Pictures("Largest losses", worst, list_largest_losses(columns))]


def extract_mask_logits(outputs: Any) -> Any:
    """Return the logits in a model's outputs: ``out`` of a dict (None if missing), or the outputs themselves."""
    return outputs.get("out") if isinstance(outputs, Mapping) else outputs


def count_pixels(masks: Tensor, classes: int) -> Tensor:
    """Return the number of pixels of each class in each mask, [n, classes]. ``masks`` are class numbers [n, H, W].

    Pixels with the value ``classes`` are not counted.
    """
    rows = masks.flatten(1) + (classes + 1) * torch.arange(len(masks), device=masks.device)[:, None]
    return rows.flatten().bincount(minlength=(classes + 1) * len(masks)).view(len(masks), classes + 1)[:, :classes]


def compute_iou_by_class(columns: Columns) -> Tensor:
    """Return the intersection over union (IoU) of each class, [classes], over all samples.

    If a class occurs in no truth and no prediction, its IoU is NaN.
    """
    correct, predicted, true = (columns[name].sum(0) for name in ("correct", "predicted", "true"))
    return correct / (predicted + true - correct)

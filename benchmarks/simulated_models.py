"""Simulate models by the samples that they classify correctly, to measure a gate without training."""

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.objectives import Classification, Facts, Multilabel, Objective, Regression, Segmentation
from flyte_ddp.release.evaluation import Evaluation

Correct = NDArray[np.bool_]
Columns = dict[str, torch.Tensor]
LABELS = 5  # of multilabel, and classes of segmentation
OBJECTIVES: dict[str, Objective] = {
    "multilabel": Multilabel(Facts(tuple("abcde"), (LABELS,))),
    "regression": Regression(Facts()),
    "segmentation": Segmentation(Facts(tuple("abcde"), (32, 32))),
}


def answers(correct: Correct, labels: NDArray[np.int64], classes: int = 10, confidence: float = 3.0) -> Evaluation:
    """Return the evaluation of a model that predicts the next class where it is wrong."""
    logits = np.zeros((len(labels), classes), dtype=np.float32)
    logits[np.arange(len(labels)), np.where(correct, labels, (labels + 1) % classes)] = confidence
    objective = Classification(Facts(tuple(map(str, range(classes)))))
    return Evaluation.from_batches(objective, [(torch.from_numpy(logits), torch.from_numpy(labels), len(labels))])


def equal_model(random: np.random.Generator, samples: int, discordant: float) -> Correct:
    """Return the correct samples of a model. Any two such models differ on the share ``discordant`` of the samples.

    All models are correct on the easy samples. On the hard samples, which are twice this share, each model is correct
    by a coin toss.
    """
    correct = np.ones(samples, dtype=bool)
    hard = round(2 * discordant * samples)
    correct[:hard] = random.random(hard) < 0.5
    return correct


def changed_model(random: np.random.Generator, before: Correct, gain: float, loss: float) -> Correct:
    """Return a model whose true gains and losses against another model are the given shares of all samples."""
    right, wrong = float(np.mean(before)), float(np.mean(~before))
    chances = np.where(before, loss / max(right, 1e-9), gain / max(wrong, 1e-9))
    return np.asarray(before ^ (random.random(len(before)) < chances))


def simulate_truth(random: np.random.Generator, objective: str, samples: int) -> NDArray[np.float64]:
    """Return targets of a test split [samples, ...]. For segmentation, the targets are pixel counts of each class."""
    if objective == "multilabel":
        return (random.random((samples, LABELS)) < np.linspace(0.05, 0.5, LABELS)).astype(float)
    if objective == "regression":
        return random.lognormal(0, 1, samples)
    return random.multinomial(1024, [0.6, 0.2, 0.1, 0.07, 0.03], samples).astype(float)


def simulate_columns(
    random: np.random.Generator, objective: str, truth: NDArray[np.float64], error: float, tails: float = 5.0
) -> Columns:
    """Return the columns of a simulated model, of which all are equally good for the same ``error``.

    Errors of labels and numbers have heavy tails, with ``tails`` degrees of Student's t. Some images are hard for all
    classes.
    """
    size = error * random.standard_t(tails, truth.shape) * np.sqrt((tails - 2) / tails)
    if objective == "multilabel":
        logits = 2 * truth - 1 + size
        return {"probability": torch.from_numpy(1 / (1 + np.exp(-logits))), "truth": torch.from_numpy(truth)}
    if objective == "regression":
        return {"prediction": torch.from_numpy(truth + size), "truth": torch.from_numpy(truth)}
    hard = random.beta(4.0, error, len(truth))[:, None]  # an image's share of pixels that are right
    correct = random.binomial(truth.astype(int), hard)
    wrong = (truth - correct).sum(axis=1).astype(int)
    confused = random.multinomial(wrong, [1 / LABELS] * LABELS)
    return {
        name: torch.from_numpy(values.astype(float))
        for name, values in (("correct", correct), ("predicted", correct + confused), ("true", truth))
    }

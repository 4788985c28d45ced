"""Simulate models by the samples that they classify correctly, to measure a gate without training."""

import numpy as np
import torch
from numpy.typing import NDArray

from flyte_ddp.objectives import Classification, Facts
from flyte_ddp.release.evaluation import Evaluation

Correct = NDArray[np.bool_]


def answers(correct: Correct, labels: NDArray[np.int64], classes: int = 10, confidence: float = 3.0) -> Evaluation:
    """Of a model that names the next class where it is wrong."""
    logits = np.zeros((len(labels), classes), dtype=np.float32)
    logits[np.arange(len(labels)), np.where(correct, labels, (labels + 1) % classes)] = confidence
    objective = Classification(Facts(tuple(map(str, range(classes)))))
    return Evaluation.from_batches(objective, [(torch.from_numpy(logits), torch.from_numpy(labels))])


def equal_model(random: np.random.Generator, samples: int, discordant: float) -> Correct:
    """One of many equally good models, any two of which differ on that share of the samples.

    On twice as many samples, the hard ones, each is right by the toss of a coin; on the others all are right.
    """
    correct = np.ones(samples, dtype=bool)
    hard = round(2 * discordant * samples)
    correct[:hard] = random.random(hard) < 0.5
    return correct


def changed_model(random: np.random.Generator, before: Correct, gain: float, loss: float) -> Correct:
    """A model whose true gains and losses against another are these shares of all samples."""
    right, wrong = float(np.mean(before)), float(np.mean(~before))
    chances = np.where(before, loss / max(right, 1e-9), gain / max(wrong, 1e-9))
    return np.asarray(before ^ (random.random(len(before)) < chances))

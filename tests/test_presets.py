"""The presets in config/: small JSON files of hyperparameters, each a complete answer to one question."""

from pathlib import Path

from flyte_ddp.config import Hyperparameters

FOLDER = Path(__file__).parents[1] / "config"
SAMPLES = {"digits": 1_437, "mnist": 60_000, "fashion_mnist": 60_000, "cifar10": 50_000}  # for training


def samples_seen(hp: Hyperparameters) -> int:
    whole = hp.epochs * round(SAMPLES[hp.dataset] * (1 - hp.validation_fraction))
    return min(whole, hp.max_steps * hp.batch_size) if hp.max_steps else whole


def test_presets_are_valid_and_need_nothing_that_their_users_would_have_to_write() -> None:
    presets = {path.stem: Hyperparameters.from_json(path.read_text()) for path in FOLDER.glob("*.json")}
    assert sorted(presets) == ["fast", "resnet18", "smoke", "tutorial"]
    assert all((hp.data_source, hp.init_from) == ("", "") for hp in presets.values())
    smoke, hp = presets.pop("smoke"), presets["tutorial"]
    assert samples_seen(smoke) * 10 < min(map(samples_seen, presets.values()))
    assert (smoke.dataset, smoke.num_ranks) == ("digits", 2)
    # Flyte's MNIST tutorial: SGD at 0.01 with momentum 0.5, ten epochs of batches of 128 on each of two ranks.
    assert (hp.dataset, hp.model, hp.optimizer, hp.schedule) == ("mnist", "tutorial", "sgd", "constant")
    assert (hp.epochs, hp.batch_size, hp.test_batch_size) == (10, 256, 1000)
    assert (hp.learning_rate, hp.momentum, hp.nesterov, hp.weight_decay) == (0.01, 0.5, False, 0.0)
    assert (hp.augment, hp.label_smoothing, hp.validation_fraction, hp.ema_decay) == ("none", 0.0, 0.0, 0.0)

"""Tables of hyperparameters, written down independently of their definition: types, ranges, bad and good values."""

import json
from pathlib import Path
from typing import Any

Values = dict[str, Any]

NAMES: dict[type, str] = {
    str: "dataset data_source test_dataset collate sample model init_from init_skip freeze sampling optimizer schedule "
    "augment keep backend strategy precision channels_last objective options class_weights threshold select_by",
    float: "validation_fraction learning_rate momentum weight_decay label_smoothing grad_clip_norm mixup ema_decay",
    int: "image_size epochs max_steps batch_size test_batch_size accumulation_steps warmup_steps early_stop_patience "
    "seed num_ranks log_interval eval_interval num_classes shuffle_shards shuffle_buffer bad_samples",
    bool: "decay_norms nesterov compile sync_batchnorm deterministic",
}
TYPES: dict[str, type] = {name: kind for kind, names in NAMES.items() for name in names.split()}

# For each number: the lowest and highest valid values, and the nearest invalid values. None means no limit.
RANGES: dict[str, tuple[float, float, float | None, float | None]] = {
    "validation_fraction": (0, 0.999999, -1e-9, 1),
    "image_size": (0, 4096, -1, 4097),
    "epochs": (1, 100_000, 0, 100_001),
    "max_steps": (0, 2**53, -1, 2**54),
    "batch_size": (1, 1_000_000, 0, 1_000_001),
    "test_batch_size": (1, 1_000_000, 0, 1_000_001),
    "accumulation_steps": (1, 100_000, 0, 100_001),
    "learning_rate": (1e-300, 1000, 0, 1000.1),
    "momentum": (0, 0.999999, -0.1, 1),
    "weight_decay": (0, 1, -1e-9, 1.001),
    "warmup_steps": (0, 2**53, -1, 2**54),
    "label_smoothing": (0, 0.999999, -0.1, 1),
    "grad_clip_norm": (-1, 1e300, -1.1, None),
    "mixup": (0, 100, -0.1, 100.1),
    "ema_decay": (0, 0.999999, -0.1, 1),
    "early_stop_patience": (0, 2**53, -1, 2**54),
    "seed": (0, 2**31, -1, 2**31 + 1),
    "num_ranks": (0, 4096, -1, 4097),
    "log_interval": (1, 2**53, 0, 2**54),
    "eval_interval": (1, 100_000, 0, 100_001),
    "num_classes": (0, 1_000_000, -1, 1_000_001),
    "shuffle_shards": (1, 4096, 0, 4097),
    "shuffle_buffer": (1, 10_000_000, 0, 10_000_001),
    "bad_samples": (0, 2**53, -1, 2**54),
}
# Changes with which a number at the end of the range is valid.
BESIDE: Values = {"batch_size": 1_000_000, "nesterov": False}

# Values, and words of the message: the field, the value, the rule.
BAD: dict[str, tuple[Values, tuple[str, ...]]] = {
    "misspelt": ({"epoch": 3}, ("'epoch'", "did you mean 'epochs'")),
    "unknown": ({"colour": "red"}, ("unknown hyperparameter 'colour'", "choose one of", "batch_size")),
    "text for int": ({"epochs": "4"}, ("epochs='4'", "whole number")),
    "true for int": ({"epochs": True}, ("epochs=True", "whole number")),
    "huge float for int": ({"max_steps": 1e300}, ("max_steps=", "at most 9007199254740992")),
    "misspelt model": ({"model": "resnet_18"}, ("'resnet_18'", "did you mean 'resnet18'")),
    "unknown optimizer": ({"optimizer": "SGD"}, ("optimizer 'SGD'", "adam, adamw, package.module:callable, sgd")),
    "torch's optimizer": ({"optimizer": "torch.optim:AdamW"}, ("'torch.optim:AdamW'", "write a function")),
    "sample without a colon": (
        {"dataset": "shards:train.json", "sample": "mine"},
        ("sample='mine'", "must have the form package.module:callable"),
    ),
    "padded images": ({"collate": "padded"}, ("collate='padded'", "not supported for dataset='digits'")),
    "shards without an address": ({"dataset": "shards:"}, ("dataset='shards:'", "must name an address, such as")),
    "smoothing of numbers": (
        {"objective": "regression", "label_smoothing": 0.1},
        ("label_smoothing=0.1", "not used by objective='regression'"),
    ),
    **{
        f"class weights {text!r}": ({"class_weights": text}, (f"class_weights={text!r}", "balanced", "at least 0"))
        for text in ("heavy", "1,,2", "1,-2", "1,inf", "0,0")
    },
    **{
        f"threshold {text!r}": ({"threshold": text}, (f"threshold={text!r}", "f1", "between 0 and 1"))
        for text in (
            "F1",
            "auto",
            "0",
            "1",
            "1.5",
            "nan",
            "recall",
            "recall=0",
            "recall=1.1",
            "cost=",
            "cost=inf",
            "f1=1",
        )
    },
    "threshold that is true": ({"threshold": True}, ("threshold=True", "must be text")),
    "threshold of numbers": (
        {"objective": "regression", "threshold": "f1"},
        ("threshold='f1'", "not used by objective='regression'"),
    ),
    "threshold without split": (
        {"threshold": "recall=0.9", "validation_fraction": 0},
        ("threshold='recall=0.9'", "validation_fraction above 0"),
    ),
    "options that are no JSON": ({"options": "{width: 3}"}, ("options='{width: 3}'", "is not JSON", "column 2")),
    "options that are a list": ({"options": "[1]"}, ("options='[1]'", "must be a JSON object")),
    "warm-up of an own schedule": (
        {"schedule": "mine:factor", "warmup_steps": 5},
        ("warmup_steps=5", "user-defined schedule"),
    ),
    "batch below ranks": ({"batch_size": 2, "num_ranks": 4}, ("batch_size=2", "ranks x accumulation_steps = 4 x 1")),
    "nesterov alone": ({"momentum": 0}, ("nesterov=True", "momentum above 0")),
    "patience without split": (
        {"early_stop_patience": 2, "validation_fraction": 0},
        ("early_stop_patience=2", "above 0"),
    ),
    "best without split": ({"keep": "best", "validation_fraction": 0}, ("keep='best'", "validation_fraction above 0")),
    "clipping to less than nothing": ({"grad_clip_norm": -0.5}, ("grad_clip_norm=-0.5", "above 0", "-1")),
    "ema without average": ({"keep": "ema"}, ("keep='ema'", "ema_decay")),
    **{
        f"{field} {side}": ({field: value}, (f"{field}={value}", "must be"))
        for field, (_, _, *outside) in RANGES.items()
        for side, value in zip(("too low", "too high"), outside, strict=True)
        if value is not None
    },
}

# Numbers that a protobuf Struct, or msgpack, cannot hold.
NOT_EVERYWHERE: dict[str, tuple[Values, tuple[str, ...]]] = {
    "nan": ({"learning_rate": float("nan")}, ("learning_rate=nan", "finite")),
    "infinity": ({"learning_rate": float("inf")}, ("learning_rate=inf", "finite")),
    "huge int": ({"max_steps": 10**400}, ("max_steps=1000", "whole number")),
    "int next to a double": ({"max_steps": 2**53 + 1}, ("max_steps=9007199254740993", "at most 9007199254740992")),
}

PRESETS = sorted((Path(__file__).parents[2] / "config").glob("*.json"))
GOOD: dict[str, tuple[Values, Values]] = {  # given values, and the expected values
    "defaults": ({}, {}),
    "whole double for int": ({"epochs": 3.0, "seed": 0.0}, {"epochs": 3, "seed": 0}),
    "int for float": ({"learning_rate": 1, "weight_decay": 0}, {"learning_rate": 1.0, "weight_decay": 0.0}),
    "no short decimal": ({"learning_rate": 1 / 3}, {"learning_rate": 1 / 3}),
    "a threshold as a number": ({"threshold": 0.25}, {"threshold": "0.25"}),
    "a rule of a threshold": ({"threshold": "recall=0.9"}, {"threshold": "recall=0.9"}),
    "own code": ({"model": "my_package.models:Net"}, {"model": "my_package.models:Net"}),
    "text beyond ASCII": ({"data_source": "/données/été 🌞\n"}, {"data_source": "/données/été 🌞\n"}),
    "options as an object": (
        {"objective": "losses:Focal", "options": {"objective": {"kind": "hard"}, "model": {"bias": True}}},
        {"objective": "losses:Focal", "options": '{"model": {"bias": true}, "objective": {"kind": "hard"}}'},
    ),
    **{path.stem: (json.loads(path.read_text()),) * 2 for path in PRESETS},
    **{
        f"{field} {end}": ({**BESIDE, field: value},) * 2
        for field, (low, high, *_) in RANGES.items()
        for end, value in (("lowest", low), ("highest", high))
    },
}

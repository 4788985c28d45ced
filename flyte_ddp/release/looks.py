"""How often a test split has been looked at: each look is claimed once, before anything is decided by it.

judgements/TEST_DIGEST/looks/00000007.json     the seventh look: which two models were compared
judgements/TEST_DIGEST/pairs/DIGEST.json       the look of two models by a rule; they may be compared again by it
judgements/TEST_DIGEST/verdicts/00000007.json  what came of it
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping

from flyte_ddp import storage
from flyte_ddp.errors import UserError
from flyte_ddp.release.registry import Registry, file_name
from flyte_ddp.storage import MissingError

RECENT = 5  # looks among which that of a judge who was killed is searched for


def claim(registry: Registry, test_digest: str, challenger: str, champion: str, rule: str) -> int:
    """The number of this look at a test split, from 1; that of the same two models before, by the same rule.

    Raises:
        UserError: the registry cannot be read or written.
    """
    folder = registry.at("judgements", test_digest)
    compared = {"challenger": challenger, "champion": champion, "rule": rule}
    pair = storage.join(folder, f"pairs/{hashlib.sha256(json.dumps(compared).encode()).hexdigest()}.json")
    with registry.explained("read"):
        try:
            return int(json.loads(storage.retried(pair, storage.read))["look"])
        except MissingError:
            pass
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{pair}: is damaged; restore it, or delete it to spend another look") from None
    with registry.explained("listed"):
        looks = storage.join(folder, "looks")
        try:
            number = sum(1 for _ in storage.retried(looks, lambda of: [*storage.list_files(of)]))
        except MissingError:
            number = 0
    if not (mine := begun(registry, looks, number, compared)):
        mine = number + 1
        with registry.explained("written"):
            while not registry.created(storage.join(looks, file_name(mine)), described(mine, compared)):
                mine += 1
    with registry.explained("written"):
        # Two who judge the same pair at the same time have two looks: the first one's counts for both from now on.
        registry.created(pair, json.dumps({"look": mine}).encode())
    return mine


def described(number: int, compared: Mapping[str, str]) -> bytes:
    """The content of a look, which no other one has."""
    return json.dumps({"look": number, **compared, "nonce": secrets.token_hex(16)}, indent=1).encode()


def begun(registry: Registry, looks: str, last: int, compared: Mapping[str, str]) -> int:
    """Among the last looks that of the same pair, whose judge was killed before anything came of it; 0 if none is."""
    for number in range(last, max(0, last - RECENT), -1):
        with registry.explained("read"):
            try:
                found = json.loads(storage.retried(storage.join(looks, file_name(number)), storage.read))
            except (MissingError, ValueError):
                continue
        if isinstance(found, dict) and {name: found.get(name) for name in compared} == compared:
            return number
    return 0

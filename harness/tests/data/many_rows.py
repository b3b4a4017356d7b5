"""many_rows.py RECORD OUT ROWS: the record with its runs again and again, numbers changed at
random,
until they have so many tensors."""

import json
import random
import sys
from typing import Any


def changed(x: Any, rng: random.Random) -> Any:
    if isinstance(x, dict):
        return {k: v if k in ("verdict", "tier") else changed(v, rng) for k, v in x.items()}
    if isinstance(x, list):
        return [changed(v, rng) for v in x]
    return x * rng.uniform(0.5, 1) if isinstance(x, float) else x


def main(record: str, out: str, rows: int) -> None:
    with open(record, encoding="utf-8") as f:
        d = json.load(f)
    rng, first, have = random.Random(1), d["runs"], 0
    d["runs"] = []
    while have < rows:
        for r in first:
            d["runs"].append(changed(r, rng))
            have += len(r.get("tensors") or [])
    for v in d["totals"]:
        d["totals"][v] = sum(r["verdict"] == v for r in d["runs"])
    with open(out, "w", encoding="utf-8") as f:
        json.dump(d, f)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

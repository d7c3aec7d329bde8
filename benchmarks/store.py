"""Does the store of texts keep its bound under much traffic, and does it find what it holds?

    python benchmarks/store.py --traffic-mb 1000 --store-mb 64

Sends texts of phrases, four bytes a token, through a store. After each text the bound must hold; now and then the
longest match of a query is compared with a plain search through all that the store still holds. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sakiyomi.lookup.store import END_OF_TEXT, StoreReader, TextStore

VOCAB_SIZE = 49152
TEXT_TOKENS = 2048
QUERY_TOKENS = 24

Tokens = npt.NDArray[np.int32]


def make_texts(rng: np.random.Generator) -> Iterator[Tokens]:
    """Texts without end: phrases of very different frequency, the pool of which slowly changes."""
    pool = [rng.integers(0, VOCAB_SIZE, rng.integers(4, 40), dtype=np.int32) for _ in range(20_000)]
    while True:
        picks = np.minimum(rng.zipf(1.3, TEXT_TOKENS // 8) - 1, len(pool) - 1)
        yield np.concatenate([pool[pick] for pick in picks])[:TEXT_TOKENS]
        pool[int(rng.integers(len(pool)))] = rng.integers(0, VOCAB_SIZE, 20, dtype=np.int32)


def search(parts: list[bytes], query: Tokens) -> int:
    """Length of the longest suffix of `query` that lies in one of the parts."""
    for size in range(len(query), 0, -1):
        wanted = query[len(query) - size :].tobytes()
        if any(_has(part, wanted) for part in parts):
            return size
    return 0


def _has(part: bytes, wanted: bytes) -> bool:
    place = part.find(wanted)
    while place >= 0 and place % 4:
        place = part.find(wanted, place + 1)
    return place >= 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traffic-mb", type=float, default=100)
    parser.add_argument("--store-mb", type=float, default=64)
    parser.add_argument("--checks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = np.random.default_rng(args.seed)
    store = TextStore(int(args.store_mb * 1e6))
    num_texts = int(args.traffic_mb * 1e6 / (4 * TEXT_TOKENS))
    recent: deque[Tokens] = deque()
    largest = num_checks = 0
    spent = 0.0
    texts = make_texts(rng)
    for number in range(num_texts):
        text = next(texts)
        listed = text.tolist()
        started = time.perf_counter()
        store.add(listed)
        spent += time.perf_counter() - started
        largest = max(largest, store.num_bytes)
        assert store.num_bytes <= args.store_mb * 1e6, "the bound is broken"
        recent.append(np.append(text, np.int32(END_OF_TEXT)))
        while (len(recent) - 1) * TEXT_TOKENS > store.num_tokens + TEXT_TOKENS:
            recent.popleft()
        if number % max(num_texts // args.checks, 1) == 0:
            stream = np.concatenate(recent)
            parts, end = [], len(stream)
            for _, automaton in store.automata():
                parts.append(stream[end - len(automaton) : end].tobytes())
                end -= len(automaton)
            old, new = recent[int(rng.integers(len(recent)))], next(texts)
            for query in (old[100 : 100 + QUERY_TOKENS], new[:QUERY_TOKENS], recent[0][:QUERY_TOKENS]):
                found = StoreReader(store).match(query.tolist())[2]
                assert found == search(parts, query), "the store finds another match than a search"
                num_checks += 1
    result = {
        "traffic_mb": args.traffic_mb,
        "store_mb": args.store_mb,
        "largest_mb": round(largest / 1e6, 2),
        "held_tokens": store.num_tokens,
        "us_per_token": round(1e6 * spent / (num_texts * TEXT_TOKENS), 3),
        "checks": num_checks,
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())

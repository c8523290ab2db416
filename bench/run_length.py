"""How often the charts of rule `calibrated` raise a false alarm: python -m bench.run_length [LIMIT BATCHES]...

Simulates a chart on independent values, whose distribution does not matter, as only ranks are looked at. The table in
`levit.detector` comes from here.
"""

from __future__ import annotations

import bisect
import random
import sys

from levit.detector import ALLOWANCE, WARM_UP, WINDOW, score_table

DEFAULTS = ((2.0, 150_000), (3.0, 1_000_000), (4.0, 3_000_000), (5.0, 9_000_000), (6.0, 25_000_000))


def alarms(limit: float, batches: int, seed: int = 0) -> int:
    """False alarms among so many batches, the chart beginning anew after each: `Chart`, with a sorted window."""
    scores = {count: score_table(count) for count in range(WARM_UP, WINDOW + 1)}
    draw = random.Random(seed).random
    window: list[float] = []
    ordered: list[float] = []
    suspect: list[float] = []
    statistic, found = 0.0, 0
    for _ in range(batches):
        value = draw()
        suspect.append(value)
        if len(window) >= WARM_UP:
            statistic = max(0.0, statistic + scores[len(window)][bisect.bisect(ordered, value)] - ALLOWANCE)
        if statistic > limit:
            found += 1
            window, ordered, statistic = [], [], 0.0
        if statistic == 0:
            for accepted in suspect:
                window.append(accepted)
                bisect.insort(ordered, accepted)
                if len(window) > WINDOW:
                    del ordered[bisect.bisect_left(ordered, window.pop(0))]
            suspect = []
    return found


def main(arguments: list[str]) -> None:
    """Print limit, batches, alarms and batches per alarm."""
    pairs = [(float(a), int(b)) for a, b in zip(arguments[::2], arguments[1::2], strict=True)] or DEFAULTS
    print("limit    batches  alarms  batches per alarm")
    for limit, batches in pairs:
        found = alarms(limit, batches)
        print(f"{limit:5.2f} {batches:10d} {found:7d} {batches / max(found, 1):18.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

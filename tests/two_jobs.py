"""Two jobs of one process of which the second waits at the first one's lock."""

import threading
import time
from collections.abc import Callable
from typing import Any


def run(job: Callable[[Callable[[], None]], Any]) -> list[Any]:
    """Returns what both have found, in the order of their ends.

    `job` is given what it calls where it holds the lock: it returns once the second job is there.
    """
    began, go, found = threading.Event(), threading.Event(), []

    def hold() -> None:
        began.set()
        assert go.wait(20)

    jobs = [threading.Thread(target=lambda: found.append(job(hold))) for _ in range(2)]
    jobs[0].start()
    assert began.wait(20)
    jobs[1].start()
    time.sleep(0.2)  # the second is at the lock
    go.set()
    for one in jobs:
        one.join(20)
    return found

"""Running a captured call alone, in a process of its own, since it may crash."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from triptych.bisect.trials import Trials
from triptych.run.process import run_trial

SECONDS = 300.0
"""The most that it may take where there is no --timeout."""


def alone(capture: Path, trials: Trials) -> str | None:
    """What running the call in the folder `capture` alone shows, as `Site.replay` puts it; None when it says nothing.

    The result is kept beside the folder, where a resumed bisection finds it.
    """
    result, log = (capture.with_name(f"{capture.name}.replay.{kind}") for kind in ("json", "log"))
    if not result.exists():
        command = (sys.executable, "-m", "triptych", "replay", str(capture), "--json", str(result))
        outcome = run_trial(command, trials.environment(), trials.timeout or SECONDS, log)
        if outcome.timed_out:
            return "hangs"
        if outcome.signal is not None:
            return "crashes"
    if not result.exists():
        return None
    found = json.loads(result.read_text(encoding="utf-8"))
    return "raises" if found["error"] else "agrees" if found["agrees"] else "differs"

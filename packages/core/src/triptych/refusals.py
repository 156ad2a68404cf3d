"""Refusals that were moved past, logged once a reason: a preference that is not met is not met in silence.

The logger is `triptych.select`. A backend named in a list that cannot run is a warning; one that `auto` passes over is
information.
"""

from __future__ import annotations

import logging

from triptych.policy import AUTO
from triptych.select import Decision

logger = logging.getLogger("triptych.select")

_LIMIT = 4096
_logged: set[tuple[str, str, str, str]] = set()


def log(decision: Decision) -> None:
    """Log every reason for which a backend before the chosen one was passed over, unless it was logged before."""
    level = logging.INFO if decision.rule.choice == (AUTO,) else logging.WARNING
    for name, reasons in decision.rejected:
        for reason in reasons:
            key = (decision.call.op, decision.call.phase, name, reason)
            if key in _logged or len(_logged) >= _LIMIT:
                continue
            _logged.add(key)
            logger.log(
                level,
                "%s.%s runs on %r, not on %r (%s): %s",
                decision.call.op,
                decision.call.phase,
                decision.chosen,
                name,
                decision.rule,
                reason,
            )

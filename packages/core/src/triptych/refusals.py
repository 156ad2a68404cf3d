"""Refusals that were moved past, logged once a reason: a preference that is not met is not met in silence.

The logger is `triptych.select`. A backend named in a list that cannot run is a warning; one that `auto` passes over is
information, unless it is broken.
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
    passed_over = logging.INFO if decision.rule.choice == (AUTO,) else logging.WARNING
    for name, reasons in decision.rejected:
        level = logging.WARNING if name in decision.broken else passed_over
        for reason in reasons:
            key = (decision.call.op, decision.call.phase, name, reason)
            if key in _logged or len(_logged) > _LIMIT:
                continue
            _logged.add(key)
            if len(_logged) > _LIMIT:
                logger.warning("%d reasons were logged; no more will be.", _LIMIT)
                return
            asked = f"{decision.call.op}.{decision.call.phase}"
            logger.log(level, "%s runs on %r, not on %r (%s): %s", asked, decision.chosen, name, decision.rule, reason)

"""Captured calls: the inputs of one phase of one call on disk, and running it again alone.

`TRIPTYCH_CAPTURE="DIRECTORY|SELECTOR"` stores calls before they are launched (capturing.py), in folders (store.py) that
`load` reads (loading.py) and `replay` runs (replaying.py). Each folder also holds a script, replay.py, that does both.
"""

from triptych.capture.capturing import Capturer, Request, make_directory, parse_request
from triptych.capture.loading import load
from triptych.capture.replaying import Replay, replay
from triptych.capture.store import Capture, save

__all__ = ["Capture", "Capturer", "Replay", "Request", "load", "make_directory", "parse_request", "replay", "save"]

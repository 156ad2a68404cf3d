"""The state directory: made, locked, continued, and never mistaken for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.bisect.predicates import Verdict
from triptych.bisect.session import Identity, Run, Session, Trial
from triptych.bisect.verdicts import Answer
from triptych.errors import UsageError

IDENTITY = Identity(("python", "job.py"), "here", "torch", "triton", ("exit",), None, 1)


def finish(session: Session, key: str) -> Trial:
    number, _ = session.begin(key)
    trial = Trial(
        number, "search", key, key, Verdict.FAIL, "ValueError: x", (Run(Verdict.FAIL, "ValueError: x", "x", 1.5, 0),)
    )
    session.finish(trial)
    return trial


def error(call) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError) as caught:
        call()
    return str(caught.value)


def test_finished_trials_are_kept_and_unfinished_ones_dropped(tmp_path: Path) -> None:
    session = Session.create(tmp_path / "state", IDENTITY)
    trials = [finish(session, "a"), finish(session, "b")]
    session.begin("c")
    session.close()
    resumed = Session.resume(tmp_path / "state", IDENTITY)
    assert list(resumed.trials) == trials
    assert resumed.known("b") == trials[1]
    assert resumed.known("c") is None
    number, folder = resumed.begin("d")
    resumed.close()
    assert number == 3
    assert (folder / "policy.txt").read_text() == "d\n"


def test_nothing_is_written_outside_the_directory(tmp_path: Path) -> None:
    session = Session.create(tmp_path / "deep" / "state", IDENTITY)
    finish(session, "a")
    session.close()
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    names = sorted(str(path.relative_to(tmp_path / "deep")) for path in tmp_path.rglob("*") if path.is_file())
    assert names == ["state/lock", "state/session.json", "state/trials/001/policy.txt", "state/trials/001/trial.json"]


def test_a_state_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    Session.create(tmp_path, IDENTITY).close()
    assert error(lambda: Session.create(tmp_path, IDENTITY)) == (
        f"{tmp_path} holds a bisection already. Continue it with --resume, remove the directory, or choose another one "
        f"with --state."
    )


def test_a_finished_bisection_is_not_to_be_continued(tmp_path: Path) -> None:
    session = Session.create(tmp_path, IDENTITY)
    session.conclude(Answer.NOT_REPRODUCED)
    session.close()
    assert error(lambda: Session.create(tmp_path, IDENTITY)) == (
        f"{tmp_path} holds a bisection that is finished; its verdict is not-reproduced. Remove the directory, or choose "
        f"another one with --state."
    )


def test_somebody_elses_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    assert error(lambda: Session.create(tmp_path, IDENTITY)) == (
        f"{tmp_path} exists and is not the state of a bisection. Choose another place with --state."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    assert error(lambda: Session.resume(tmp_path / "none", IDENTITY)) == (
        f"There is no bisection to resume in {tmp_path / 'none'}. Leave out --resume, or name it with --state."
    )
    assert not (tmp_path / "none").exists()


def test_the_state_of_another_bisection_is_refused(tmp_path: Path) -> None:
    Session.create(tmp_path, IDENTITY).close()
    other = replace(IDENTITY, command=("python", "job.py", "--steps", "9"), bad="cuda")
    assert error(lambda: Session.resume(tmp_path, other)) == (
        f"{tmp_path} holds another bisection. Repeat its options, or choose another place with --state:\n"
        f"  command: stored python job.py, asked python job.py --steps 9\n"
        f"  bad: stored triton, asked cuda"
    )


def test_two_bisections_do_not_share_a_directory(tmp_path: Path) -> None:
    session = Session.create(tmp_path, IDENTITY)
    assert error(lambda: Session.resume(tmp_path, IDENTITY)) == (
        f"Another bisection is at work in {tmp_path}. Wait for it, or choose another --state."
    )
    session.close()
    Session.resume(tmp_path, IDENTITY).close()


def test_a_damaged_state_is_an_error(tmp_path: Path) -> None:
    Session.create(tmp_path, IDENTITY).close()
    (tmp_path / "session.json").write_text("{")
    assert "cannot be read" in error(lambda: Session.resume(tmp_path, IDENTITY))
    (tmp_path / "session.json").write_text('{"schema": 99}')
    assert "was written by another version of triptych" in error(lambda: Session.resume(tmp_path, IDENTITY))

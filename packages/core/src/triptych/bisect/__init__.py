"""Bisecting a failing job by swapping implementations, one fresh process a trial.

engine.py      the search: candidates and outcomes, nothing else
policies.py    from a subset of calls to the policy that swaps exactly these
predicates.py  what counts as the failure, signatures, the verdict of a run
session.py     the state directory
trials.py      running trials
proof.py       whether the start holds
rate.py        how often the bad policy fails, and what a trial that passed is worth
bisection.py   the course: prove the start, search, confirm, capture
sites.py       from candidates to what a report says of them
replays.py     running a captured call alone
start.py       from what the user asked to a bisection, everything checked before anything runs
verdicts.py    the result as data
progress.py, present.py  what is shown meanwhile, and at the end
"""

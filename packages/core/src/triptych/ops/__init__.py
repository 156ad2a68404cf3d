"""The ops: one file each, in the order maths, public function, checks, reference, bounds, composite, cases, spec.

_norm_bounds.py derives the bounds that the norms share.
"""

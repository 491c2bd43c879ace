"""The proof of the same-bits promise: what ``shoal certify`` does.

A set of requests is answered alone, and again in every condition that must not matter; tokens and
fp32 log-probabilities have to be the same bits.
"""

from shoal.inference.certify.proof import Finding, Proof
from shoal.inference.certify.prove import prove
from shoal.inference.certify.subject import Subject
from shoal.inference.certify.trace import Trace

__all__ = ["Finding", "Proof", "Subject", "Trace", "prove"]

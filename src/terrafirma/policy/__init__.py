"""From an unreliability to a decision: accept or abstain, with a promise that holds on finite samples.

``Policy.calibrate`` certifies the risk of what it accepts (learn-then-test: Angelopoulos et al., 2021); why its promise
holds for the threshold that it chose is proved in ``docs/policy.md``. ``ErrorProbability`` is for users who want a number
between 0 and 1 instead.
"""

from terrafirma.policy.probability import ErrorProbability, Reliability
from terrafirma.policy.threshold import GroupPolicy, Policy

__all__ = ["ErrorProbability", "GroupPolicy", "Policy", "Reliability"]

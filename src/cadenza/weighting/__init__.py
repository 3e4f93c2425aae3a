"""HOW MUCH each contribution counts: all alike, by samples, by a function, by norms, and whose is left out.

A weighting says what this worker's contribution counts (`own`, which travels in the header of a round) and, once the
headers of all members are there, which share each of them has in the mean (`weigh`). All members weigh the same
headers, so all come to the same shares without asking each other.

>>> members = [PlainContribution(weight=3.0), PlainContribution(weight=1.0)]
>>> uniform().weigh(members, {}).shares
(0.75, 0.25)
"""

from cadenza.weighting.base import Contribution, PlainContribution, State, Weighed, Weighting, needs_anchor
from cadenza.weighting.by_function import ByFunction, by_function
from cadenza.weighting.edit import EditNorms, edit_norms
from cadenza.weighting.outliers import Outliers, outliers
from cadenza.weighting.samples import Samples, samples
from cadenza.weighting.shares import checked_weight, shares_of
from cadenza.weighting.uniform import Uniform, uniform

__all__ = [
    "ByFunction",
    "Contribution",
    "EditNorms",
    "Outliers",
    "PlainContribution",
    "Samples",
    "State",
    "Uniform",
    "Weighed",
    "Weighting",
    "by_function",
    "checked_weight",
    "edit_norms",
    "needs_anchor",
    "outliers",
    "samples",
    "shares_of",
    "uniform",
]

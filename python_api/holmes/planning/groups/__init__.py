"""Groups: which ranks make up each group, in which order, and the NICs that they share.

Flow: sizes (what fits) -> rank_grid (order over clusters, ranks of each kind of group) -> reach (networks that
their hosts share) -> group.
"""

from holmes.planning.groups.group import Group, Groups
from holmes.planning.groups.rank_grid import KINDS, RankGrid

__all__ = ["KINDS", "Group", "Groups", "RankGrid"]

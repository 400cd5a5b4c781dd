"""holmes.workable_plan: the sizes asked for where they fit, else the nearest, with the reason."""

import pytest
from test_groups import two_clusters

from holmes import workable_plan

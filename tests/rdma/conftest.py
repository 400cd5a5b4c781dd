"""Fixture `hosts`: the test is skipped where the rig lacks something, which the reason names."""

import pytest
import rig


@pytest.fixture(scope="session")
def hosts() -> None:
    try:
        rig.kernel()
        rig.verbs_root()
    except rig.Missing as missing:
        pytest.skip(str(missing))

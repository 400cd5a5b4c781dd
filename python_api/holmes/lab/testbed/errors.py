"""What can go wrong before a command runs on the testbed."""

from holmes_comm.errors import HolmesError, UsageError


class SpecError(UsageError):
    """The YAML description of a testbed is wrong; the message names the place, the rule and the fix."""


class TestbedError(HolmesError):
    """The testbed could not be built or has ended: a tool is missing, the kernel refuses, or its first process died."""

    __test__ = False  # not a test class, whatever its name says to pytest

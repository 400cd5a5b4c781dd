"""What can go wrong before a command runs on the testbed."""


class SpecError(ValueError):
    """The YAML description of a testbed is wrong; the message names the place, the rule and the fix."""


class TestbedError(RuntimeError):
    """The testbed could not be built or has ended: a tool is missing, the kernel refuses, or its first process died."""

    __test__ = False  # not a test class, whatever its name says to pytest

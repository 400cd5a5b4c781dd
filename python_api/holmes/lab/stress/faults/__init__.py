"""Injected faults: what a stress run on the testbed survives, and what it reports otherwise (docs/stress.md).

Flow: a seed and a number -> the faults of one episode (catalogue) -> long-lived rank processes load the network
(worker) while the driver injects them (driver) -> what every rank reported is checked (check) -> what is
left behind (leaks) -> one table (table).
"""

from holmes.lab.stress.faults.catalogue import FAULTS
from holmes.lab.stress.faults.driver import Driver
from holmes.lab.stress.faults.settings import FaultSettings
from holmes.lab.stress.faults.soak import run_faults

__all__ = ["FAULTS", "Driver", "FaultSettings", "run_faults"]

"""Who waits for whom, in which operation, on which NIC: the flight records of a job's processes, merged."""

from holmes.tools.debug.cause import Cause
from holmes.tools.debug.diagnose import diagnose
from holmes.tools.debug.record import ProcessRecord
from holmes.tools.debug.sources import ask_folder, ask_processes, read_folder

__all__ = ["Cause", "ProcessRecord", "ask_folder", "ask_processes", "diagnose", "read_folder"]

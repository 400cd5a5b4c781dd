"""Who waits for whom, in which operation, on which NIC: the flight records of a job's processes, merged."""

from holmes.debug.diagnose import diagnose
from holmes.debug.finding import Finding
from holmes.debug.record import ProcessRecord
from holmes.debug.sources import ask_folder, ask_processes, read_folder

__all__ = ["Finding", "ProcessRecord", "ask_folder", "ask_processes", "diagnose", "read_folder"]

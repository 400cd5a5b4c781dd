"""A report: one HTML page that needs nothing else, of machines, topology, plan and measurements."""

"""Cluster: the machines, their NICs and who reaches whom, as a file says it or as a running job finds it."""

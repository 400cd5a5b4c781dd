"""Tools: the `holmes` command, and what it measures, examines and explains."""

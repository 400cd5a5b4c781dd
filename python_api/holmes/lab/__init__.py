"""Lab: emulated clusters, injected faults and the demo, on one machine. Nothing that trains imports it.

`pip install holmes-comm[lab]` brings what it needs beside the runtime.
"""

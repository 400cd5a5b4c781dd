"""The demo: one small GPT trained over two emulated clusters, as a user would today and with Holmes."""

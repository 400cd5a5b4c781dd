"""What a running job does at this moment: groups, NICs, rates, waits and retransmissions of each rank."""

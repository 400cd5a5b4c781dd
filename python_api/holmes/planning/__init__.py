"""Planning: from machines and a model to groups, partition, schedule and NICs; runs on a laptop, without torch.

Flow: model, groups and partition -> plan -> simulate -> search, which tries many plans.
"""

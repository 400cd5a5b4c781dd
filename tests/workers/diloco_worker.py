"""DiLoCo of torchft over clusters: each is a replica of its own, with data-parallel ranks inside; only every SYNC_EVERY
steps something crosses. Prints as JSON the loss on data that nobody trained on, and what was sent over which NIC."""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist
from diloco_task import SYNC_EVERY, batch, evaluate, inner_optimizer, make_model, sync_rounds
from torch import nn
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from holmes.training.integrations.torchft import ProcessGroupHolmes
from holmes_comm import NicSelection, torch_backend

LIGHTHOUSE_PORT, STORE_PORT = 29510, 29511
CLUSTERS = "ab"
TIMEOUT = timedelta(seconds=60)


def sent_bytes(group: dist.ProcessGroup) -> dict[str, int]:
    """By interface."""
    sent: Counter[str] = Counter()
    for row in torch_backend.connections(group):
        sent[row["interface"]] += row["sent_bytes"]
    return dict(sent)


def main() -> None:
    torch.set_num_threads(1)
    host = os.environ["HOLMES_HOSTNAME"]
    cluster, rank = CLUSTERS.index(host[0]), int(host[1:])
    ranks = int(os.environ["WORLD_SIZE"]) // len(CLUSTERS)
    lighthouse = LighthouseServer(bind=f"0.0.0.0:{LIGHTHOUSE_PORT}", min_replicas=2) if host == "a0" else None
    first = f"{host[0]}0"
    store = dist.TCPStore(first, STORE_PORT, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)
    dist.init_process_group("holmes", store=dist.PrefixStore("inner", store), rank=rank, world_size=ranks)
    model = make_model()
    inside = nn.parallel.DistributedDataParallel(model)
    inner, schedule = inner_optimizer(model)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    across = ProcessGroupHolmes(timeout=TIMEOUT, nics=NicSelection(nic_class="ethernet"))
    manager = Manager(
        pg=across, min_replica_size=2, use_async_quorum=False, init_sync=False, replica_id=f"cluster-{cluster}",
        load_state_dict=model.load_state_dict, state_dict=model.state_dict, rank=rank, world_size=ranks,
        store_addr=first, store_port=STORE_PORT, lighthouse_addr=f"http://a0:{LIGHTHOUSE_PORT}", hostname=host,
        timeout=TIMEOUT, connect_timeout=TIMEOUT, quorum_timeout=TIMEOUT,
    )  # fmt: skip
    shard, shards = cluster * ranks + rank, ranks * len(CLUSTERS)
    with DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY):
        step = 0
        while manager.current_step() < sync_rounds():
            inputs, labels = batch(step, shard, shards)
            inner.zero_grad()
            nn.functional.cross_entropy(inside(inputs), labels).backward()
            inner.step()
            schedule.step()
            step += 1
    outcome = {"loss": evaluate(model), "steps": step, "inside": sent_bytes(dist.group.WORLD)}
    outcome["across"] = sent_bytes(across.parent)
    outcome["model_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps(outcome), flush=True)
    dist.barrier()
    manager.shutdown(wait=False)
    store.add("done", 1)
    if rank == 0:  # it serves the store
        while store.add("done", 0) < ranks:
            pass
    dist.destroy_process_group()
    if lighthouse is not None:
        lighthouse.shutdown()


main()

"""`any_launcher.py` under Ray Train: TorchConfig names the backend, Ray makes the group on every worker.

    python examples/ray_train.py --workers 2

Needs `pip install 'ray[train]'`. Without a cluster (RAY_ADDRESS) Ray starts one on this machine.
"""

import argparse

import ray
from any_launcher import train
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train_here() -> None:
    """On a worker: importing this package makes torch know the backend, before Ray names it."""
    train()


def main() -> None:
    """Starts the workers and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    workers = parser.parse_args().workers
    ray.init()
    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.1})
    TorchTrainer(train_here, scaling_config=scaling, torch_config=TorchConfig(backend="holmes")).fit()


if __name__ == "__main__":
    main()

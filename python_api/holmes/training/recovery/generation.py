"""Generation: what the training function gets: its place, plan and process groups, the steps to do, and checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holmes.cluster.topology import Topology
from holmes.planning.plan.plan import Plan
from holmes.training.process_groups import ProcessGroups, process_groups
from holmes.training.recovery.checkpoints import Checkpoints
from holmes.training.recovery.errors import CheckpointError, UnequalStepsError
from holmes.training.recovery.member import Member
from holmes.training.recovery.state import TrackedState
from holmes_comm.errors import HolmesError, UsageError

_log = logging.getLogger(__name__)


class Regroup(Exception):
    """Leaves the training function at a boundary, because somebody waits to be let in. Let it pass."""


class Generation:
    """One membership of the job, from its set-up to a failure or a boundary at which others join. Not thread-safe.

    number: 1 for the first. rank, world_size: of this process, in the order of `members`. topology, plan: of those who
    are there. step: steps done, all generations together. samples: sum of the global batches of these steps, where the
    plan has them: the position in the data.
    """

    def __init__(
        self,
        number: int,
        members: Sequence[Member],
        rank: int,
        topology: Topology,
        plan: Plan,
        checkpoints: Checkpoints,
        every_steps: int,
        backend: str,
        can_grow: Callable[[], bool],
        claim: Callable[[], None] = lambda: None,
        may_write: Callable[[], None] = lambda: None,
        may_train: Callable[[], None] = lambda: None,
    ) -> None:
        self.number, self.members, self.rank = number, tuple(members), rank
        self.world_size = len(self.members)
        self.topology, self.plan = topology, plan
        self.step = 0
        self.samples = 0
        self.saved_step: int | None = None  # of the last checkpoint written or loaded
        self.is_left = False  # at a boundary
        self._checkpoints, self._every_steps, self._backend = checkpoints, every_steps, backend
        self._can_grow = can_grow
        self._claim, self._may_write, self._may_train = claim, may_write, may_train
        self._last_save_failed = False
        self._state: TrackedState | None = None
        self._names_checked = False

    @cached_property
    def groups(self) -> ProcessGroups:
        """Collective over the default group when first read. This rank's process groups on the plan's NICs."""
        return process_groups(self.plan, self._backend)

    @property
    def stage(self) -> int:
        """The pipeline stage of this rank, from 0."""
        return self.plan.stage_of(self.rank)

    def restore(self, *, name_of: Callable[[str], str] | None = None, **objects: Any) -> None:
        """Collective over the default group. What checkpoints hold, by name; loads the last one, if there is any.

        `objects`: modules, optimizers, schedulers, data loaders: anything with state_dict and load_state_dict that
        torch.distributed.checkpoint saves for any layout. `name_of`: name in a module -> name in checkpoints. A
        checkpoint that cannot be read, on any rank, is passed over for the one before, with a warning. Raises
        CheckpointError where none of them can be, or holds these objects, FencedError where another job has the folder.
        """
        self._state = TrackedState(objects, name_of)
        found: list[Any] = [self._found() if self.rank == 0 else None]
        dist.broadcast_object_list(found)
        if isinstance(found[0], HolmesError):
            raise found[0]
        if not found[0]:
            return
        state = {**self._state.collect(), "holmes": self._position()}
        path = self._load_first(state, found[0])
        self._state.give_back(state)
        self.step, self.samples = (int(number) for number in state["holmes"].tolist())
        self.saved_step = self.step
        if self.rank == 0:
            _log.info("generation %d goes on from step %d of %s", self.number, self.step, path)

    def _found(self) -> list[Path] | HolmesError:
        """The complete checkpoints, the one to go on from first, once the folder is this generation's."""
        try:
            self._claim()
            return self._checkpoints.complete()[::-1]
        except HolmesError as error:
            return error
        except OSError as error:
            return CheckpointError(f"{self.members[0]} cannot use the folder of checkpoints: {error}")

    def _load_first(self, state: dict[str, Any], paths: Sequence[Path]) -> Path:
        """Collective. Loads the first of these that all ranks can read."""
        errors: list[str] = []
        for path in paths:
            try:
                self._checkpoints.load(state, path, self._who)
            except CheckpointError as error:
                errors.append(str(error))
                continue
            if errors:
                _log.warning("goes on from %s, because a later %s", path, "; ".join(errors))
                if self.rank == 0:
                    self._checkpoints.set_aside(paths[: len(errors)])
            return path
        raise CheckpointError("; ".join(errors) + "; remove the folder's checkpoints to begin from the start")

    def _who(self, rank: int) -> str:
        return str(self.members[rank])

    def steps(self, until: int) -> Iterator[int]:
        """Collective. The numbers of the steps still to do, up to `until` of the whole run; call `restore` before.

        After every `every_steps` of them, and after the last, collective: saves a checkpoint. If others wait to be let
        in then, the training function is left, by an exception, and begins again with them. No step begins once the
        generation has failed or this rank's lease is over, even where a stopped process has just gone on.
        """
        if self._state is None:
            raise UsageError("call restore before steps: the objects that checkpoints hold, and their last state")
        self._check_equal(until)
        while self.step < until:
            self._may_train()
            yield self.step
            self.step += 1
            self.samples += self.plan.global_batch or 0
            if self.step == until or self.step % self._every_steps == 0:
                self.boundary(may_leave=self.step < until)

    def _check_equal(self, until: int) -> None:
        """Collective. Raises UnequalStepsError on all ranks where some would save after other steps than the others."""
        own = torch.tensor([until, self._every_steps, self.step], dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in self.members]
        dist.all_gather(rows, own)
        names = ("until of steps()", "every_steps of run_elastic", "the step to go on from")
        for name, values in zip(names, torch.stack(rows).T.tolist(), strict=True):
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise UnequalStepsError(
                        f"{name} is {values[0]:g} on {self._who(0)} and {value:g} on {self._who(rank)}; checkpoints "
                        "are saved together, after the same steps: give all ranks the same"
                    )

    def boundary(self, *, may_leave: bool = True) -> None:
        """Collective over the default group. Saves a checkpoint now; lets others in, who wait. `steps` calls it.

        Where it cannot be written, on any rank, training goes on with a warning; the second time in a row, or with
        `may_leave` False, as after the last step, raises CheckpointError on all ranks.
        """
        if self._state is None:
            raise UsageError("call restore before boundary: the objects that checkpoints hold")
        state = {**self._state.collect(), "holmes": self._position()}
        if not self._names_checked:
            self._state.check_names(self.plan)
            self._names_checked = True
        try:
            self._checkpoints.save(state, self.step, self.number, self.rank == 0, self._may_write, self._who)
        except CheckpointError as error:
            if self._last_save_failed or not may_leave:
                raise
            self._last_save_failed = True
            _log.warning("%s; training goes on until the next", error)
            return
        self._last_save_failed = False
        self.saved_step = self.step
        wanted = torch.tensor([int(may_leave and self.rank == 0 and self._can_grow())])
        dist.broadcast(wanted, 0)
        if wanted.item():
            self.is_left = True
            raise Regroup

    def _position(self) -> torch.Tensor:
        return torch.tensor([self.step, self.samples])

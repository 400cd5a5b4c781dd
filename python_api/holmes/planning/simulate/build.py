"""A step as tasks of the event engine."""

from __future__ import annotations

from collections.abc import Mapping

from holmes.planning.simulate.engine import Engine, Key
from holmes.planning.simulate.schedules import Operation, operations
from holmes.planning.simulate.step import Boundary, Route, Stage, Step

COMMUNICATION = ("p2p", "gather", "reduce", "embedding")
_KINDS = {"F": "forward", "B": "backward", "W": "weights"}
_LATER = 1e-3  # rate of a transfer beside one of a pipeline that goes first: next to nothing


def device_of(stage: int) -> str:
    """Name of a stage's device."""
    return f"stage {stage}"


def build(step: Step) -> Engine:
    """The engine with all tasks of the step, not yet run."""
    engine = Engine(step.links, step.cores)
    ends: list[list[Key]] = []
    last: list[list[Key]] = []  # computations of each stage
    for index in range(len(step.stages)):
        pipelines = [_StageTasks(engine, step, index, turn) for turn in range(step.turns or 1)]
        last.append([pipeline.add() for pipeline in pipelines])
        ends.append(last[-1] + _add_reduces(engine, step, index, pipelines))
    if step.embedding is not None and len(step.stages) > 1:
        _exchange(engine, step.embedding, (*last[0], *last[-1]))
        for index in (0, len(step.stages) - 1):
            ends[index] += [("embedding", "down"), ("embedding", "up")]
    everything = [key for keys in ends for key in keys]
    for index, stage in enumerate(step.stages):
        after_keys = everything if step.global_norm else ends[index]
        engine.compute(
            ("optimizer", index), "optimizer", device_of(index), stage.optimizer_s, after_keys, "optimizer", stage.cores
        )
    return engine


class _StageTasks:
    """Of one pipeline. Those that have their turn before the last one's are beside what is told of a step."""

    def __init__(self, engine: Engine, step: Step, index: int, turn: int) -> None:
        self.engine, self.step, self.index, self.turn = engine, step, index, turn
        self.pipelines = step.turns or 1
        self.is_last_turn = turn == self.pipelines - 1
        self.stage: Stage = step.stages[index]
        self.device = device_of(index) if self.is_last_turn else f"{device_of(index)}, turn {turn}"
        self.parts = len(step.stages) * step.chunks  # of the model
        sizes = (step.schedule, len(step.stages), index, step.micro_batches, step.chunks)
        self.order = operations(*sizes, step.warmup, step.group)
        final = "W" if step.schedule == "zb-h1" else "B"  # the phase that completes the gradients
        self.last = {operation.chunk: operation for operation in self.order if operation.phase == final}
        self.durations_s = {phase: self._duration_s(phase) for phase in _KINDS}

    def add(self) -> Key:
        """Adds the pipeline's computations and messages on this stage, and its parameters' transfers once. Returns the
        key of the last computation."""
        if self.is_last_turn:
            self._add_gathers()
        for operation in self.order:
            self._add_compute(operation)
            self._add_send(operation)
        return self.end

    @property
    def end(self) -> Key:
        """Of the last computation."""
        return self._key(self.order[-1])

    def ready(self, chunk: int, bucket: int, buckets: int) -> Key:
        """What makes this bucket of a chunk's gradients."""
        return self._part(self.last[chunk], bucket, buckets)

    def _add_gathers(self) -> None:
        buckets = self.step.buckets(self.stage.gather_bytes)
        for chunk in range(self.step.chunks):
            for bucket in range(buckets):
                key = ("gather", self.index, chunk, bucket)
                _collective(self.engine, self.step, key, self.stage.gather_bytes, buckets, [])

    def _usage(self, whole: Mapping[str, float]) -> Mapping[str, float]:
        """This pipeline's part of what all that run in lock-step take."""
        return whole if self.pipelines == 1 else {name: count / self.pipelines for name, count in whole.items()}

    def _add_compute(self, operation: Operation) -> None:
        """Adds an operation; in parts where buckets of it are waited for, or wait for it."""
        after: list[Key] = [source] if (source := self._source(operation)) else []
        duration_s = self.durations_s[operation.phase]
        is_last = self.last[operation.chunk] == operation
        if is_last:
            duration_s += self.stage.sharding_s / self.step.chunks
        parts, gathers = 1, 0
        if operation.phase == "F" and operation.micro_batch == 0:
            gathers = self.step.buckets(self.stage.gather_bytes)
            parts = gathers if self.step.overlap_gather and gathers else 1
        elif self.step.overlap_reduce and is_last:
            parts = self.step.buckets(self.stage.reduce_bytes) or 1
        label = f"{operation.phase}{operation.micro_batch}" + (f".{operation.chunk}" if self.step.chunks > 1 else "")
        for part in range(parts):
            needs = list(after)
            if gathers:
                bucket = part if self.step.overlap_gather else gathers - 1
                needs.append(("gather", self.index, operation.chunk, bucket))
                if not self.step.overlap_gather:
                    needs.append(("gather", self.index, self.step.chunks - 1, gathers - 1))
            self.engine.compute(
                self._part(operation, part, parts),
                _KINDS[operation.phase],
                self.device,
                duration_s / parts,
                needs,
                label,
                self._usage(self.stage.cores),
            )

    def _duration_s(self, phase: str) -> float:
        if phase == "F":
            return self.stage.forward_s / self.step.chunks
        seconds = self.stage.backward_s / self.step.chunks
        if self.step.schedule == "zb-h1":  # which has one chunk
            seconds += self.stage.dividing_s
            share = self.stage.weight_share
            seconds *= share if phase == "W" else 1 - share
        return seconds

    def _own(self, *key: Key) -> Key:
        return key if self.is_last_turn else ("turn", self.turn, key)

    def _key(self, operation: Operation) -> Key:
        return self._own(operation.phase, self.index, operation.micro_batch, operation.chunk)

    def _part(self, operation: Operation, part: int, parts: int) -> Key:
        """Key of a part; the last part has the operation's own key, so that others can wait for the whole."""
        key = self._key(operation)
        return key if part == parts - 1 else (key, part)

    def _source(self, operation: Operation) -> Key | None:
        """What must arrive before the operation; None for a sample's first forward and for weight gradients."""
        if operation.phase == "W":
            return None
        position = operation.chunk * len(self.step.stages) + self.index
        if operation.phase == "F":
            return self._own("send F", operation.micro_batch, position - 1) if position > 0 else None
        if position == self.parts - 1:
            return self._own("F", self.index, operation.micro_batch, operation.chunk)
        return self._own("send B", operation.micro_batch, position + 1)

    def _add_send(self, operation: Operation) -> None:
        stages = len(self.step.stages)
        position = operation.chunk * stages + self.index
        if operation.phase == "F" and position < self.parts - 1:
            boundary = self.step.boundaries[self.index]
            route = boundary.forward_route
        elif operation.phase == "B" and position > 0:
            boundary = self.step.boundaries[(self.index - 1) % stages]
            route = boundary.backward_route
        else:
            return
        self.engine.transfer(
            self._own(f"send {operation.phase}", operation.micro_batch, position),
            "p2p",
            boundary.size_bytes,
            self._usage(route.usage),
            [self._key(operation)],
            travel_s=route.latency_s,  # micro-batches follow each other: none waits for the one before to arrive
            channel=self._own("p2p", operation.phase, self.index),
            label=f"{operation.phase}{operation.micro_batch}",
            core_s_per_byte=route.core_s_per_byte,
            weight=_LATER**self.turn,
        )


def _add_reduces(engine: Engine, step: Step, index: int, pipelines: list[_StageTasks]) -> list[Key]:
    """Adds the sums of a stage's gradients over its data-parallel ranks. Returns their keys."""
    stage = step.stages[index]
    reduces: list[Key] = []
    is_edge = step.embedding is not None and len(step.stages) > 1 and index in (0, len(step.stages) - 1)
    for chunk in sorted(pipelines[0].last, reverse=True):
        buckets = step.buckets(stage.reduce_bytes)
        for bucket in range(buckets):
            after: list[Key]
            if step.overlap_reduce:  # the embedding's sum goes on beside them
                after = [pipeline.ready(chunk, bucket, buckets) for pipeline in pipelines]
            else:
                after = [pipeline.end for pipeline in pipelines]
                if is_edge:
                    after += [("embedding", "down"), ("embedding", "up")]
            key = ("reduce", index, chunk, bucket)
            _collective(engine, step, key, stage.reduce_bytes, buckets, after)
            reduces.append(key)
    return reduces


def _collective(
    engine: Engine, step: Step, key: tuple[str, int, int, int], total_bytes: float, buckets: int, after: list[Key]
) -> None:
    kind, index, *_ = key
    route, size_bytes = step.stages[index].data_route, total_bytes / (step.chunks * buckets)
    engine.transfer(
        key,
        kind,
        size_bytes,
        route.usage,
        after,
        latency_s=route.latency_s,
        channel=("data", index),
        label=kind,
        core_s_per_byte=route.core_s_per_byte,
    )


def _exchange(engine: Engine, embedding: Boundary, after: tuple[Key, ...]) -> None:
    """Both ways at once: each side sends its gradients' half and gets the sum of the other half, twice."""
    ways: list[tuple[str, Route]] = [("down", embedding.forward_route), ("up", embedding.backward_route)]
    for name, route in ways:
        engine.transfer(
            ("embedding", name),
            "embedding",
            embedding.size_bytes,
            route.usage,
            after,
            latency_s=route.latency_s,
            channel=("embedding", name),
            label="embedding",
            core_s_per_byte=route.core_s_per_byte,
        )

"""The processes of a job: who is which rank of which communicator, also those of which there is no record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holmes.tools.debug.record import ProcessRecord, View
from holmes.tools.debug.sources import Silent

__all__ = ["Communicator", "JobRecord", "Member", "jobs_of"]


@dataclass
class Member:
    """A process of the job. `record`: None where it did not tell; `silence`: why, as in Silent, or unknown ("")."""

    host: str
    pid: int
    job_rank: int | None = None
    record: ProcessRecord | None = None
    silence: str = ""
    number: int = -1  # as it is called in sentences

    def view(self, communicator_id: str) -> View | None:
        """What it says of that communicator."""
        if self.record is None:
            return None
        return next((view for view in self.record.views if view.id == communicator_id), None)


@dataclass
class Communicator:
    """A communicator, with the member behind each rank."""

    id: str
    name: str
    members: list[Member]
    views: dict[int, View] = field(default_factory=dict)

    def nic(self, of: int, towards: int) -> str:
        """The NIC of rank `of` towards another one, as itself says, else the other's towards it; empty: unknown."""
        for one, other in ((of, towards), (towards, of)):
            view = self.views.get(one)
            if view is not None and view.ranks and view.ranks[other].nic:
                return view.ranks[other].nic
        return ""


@dataclass(frozen=True)
class SetUp:
    """A communicator for which some ranks wait that others have not come to. `members`: those who wait, by rank."""

    name: str
    size: int
    members: dict[int, Member]

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come."""
        return [rank for rank in range(self.size) if rank not in self.members]


_NOTHING = ProcessRecord("", 0, None, False, "", 0.0, ())


@dataclass
class JobRecord:
    """Processes that share communicators, directly or by others."""

    members: list[Member]
    communicators: list[Communicator]
    set_ups: list[SetUp] = field(default_factory=list)

    def is_history(self, communicator: Communicator) -> bool:
        """Whether a communicator failed and its ranks have gone on without it: they have called others since."""
        if not any(view.failure for view in communicator.views.values()):
            return False
        return all(
            any(
                operation.queued_s > view.taken_s
                for other in (communicator.members[rank].record or _NOTHING).views
                for operation in other.recent[-1:]
                if other.id != communicator.id
            )
            for rank, view in communicator.views.items()
            if view.failure
        )

    @property
    def taken_s(self) -> float:
        """When the newest record was made, on the wall clock."""
        return max((member.record.taken_s for member in self.members if member.record), default=0.0)


def jobs_of(records: Iterable[ProcessRecord], silent: Iterable[Silent] = ()) -> list[JobRecord]:
    """Sorts records into jobs, the one with the newest record first. Processes without communicators are left out."""
    records = [record for record in records if _ids(record)]
    jobs = []
    while records:
        job = [records.pop()]
        ids = _ids(job[0])
        while more := [record for record in records if ids & _ids(record)]:
            job += more
            records = [record for record in records if record not in more]
            ids |= set().union(*(_ids(record) for record in more))
        jobs.append(_make_job(job, list(silent)))
    return sorted(jobs, key=lambda job: -job.taken_s)


def _ids(record: ProcessRecord) -> set[str]:
    return {view.id if view.ranks else _waiting_for(view) for view in record.views if view.ranks or _is_set_up(view)}


def _is_set_up(view: View) -> bool:
    return not (view.ranks or view.failure or view.is_closed)


def _waiting_for(view: View) -> str:
    return f"{view.name} of {view.size}"


def _make_job(records: list[ProcessRecord], silent: list[Silent]) -> JobRecord:
    members = {(r.host, r.pid): Member(r.host, r.pid, r.job_rank, r) for r in records}
    communicators: dict[str, Communicator] = {}
    set_ups: dict[str, SetUp] = {}
    for record in records:
        for view in record.views:
            if _is_set_up(view):
                set_up = set_ups.setdefault(_waiting_for(view), SetUp(view.name, view.size, {}))
                set_up.members[view.rank] = members[record.host, record.pid]
            if not view.ranks:
                continue
            for rank in view.ranks:
                member = members.setdefault((rank.host, rank.pid), Member(rank.host, rank.pid, rank.job_rank))
                if member.record is None and not member.silence:
                    member.silence = _silence(member, silent)
            ranks = [members[rank.host, rank.pid] for rank in view.ranks]
            communicator = communicators.setdefault(view.id, Communicator(view.id, view.name, ranks))
            communicator.views[view.rank] = view
    ordered = sorted(communicators.values(), key=lambda communicator: (-len(communicator.members), communicator.name))
    _number(list(members.values()), ordered, list(set_ups.values()))
    incomplete = [set_up for set_up in set_ups.values() if set_up.missing]
    return JobRecord(sorted(members.values(), key=lambda member: member.number), ordered, incomplete)


def _silence(member: Member, silent: list[Silent]) -> str:
    for one in silent:
        if one.name_pid == member.pid and member.host.startswith(one.host):
            return one.state
    return ""


def _number(members: list[Member], communicators: list[Communicator], set_ups: list[SetUp]) -> None:
    """Ranks of the job, where all say theirs; else the ranks of the largest communicator, then in any order."""
    if all(member.job_rank is not None for member in members):
        for member in members:
            member.number = member.job_rank if member.job_rank is not None else -1
        return
    order = [member for communicator in communicators for member in communicator.members]
    order += [set_up.members[rank] for set_up in set_ups for rank in sorted(set_up.members)]
    by_identity = {id(member): member for member in [*order, *members]}
    for number, member in enumerate(by_identity.values()):
        member.number = number

"""A real etcd 3 for tests: its members on this host's loopback, each to be killed, stopped and started again."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request

import pytest
from ports import free_ports

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="needs etcd 3 (apt-get install etcd-server); the tests start it themselves"
)


class Etcd:
    """`members` of one etcd, whose data are in `folder`. Leave it to end them. `options`: of each member."""

    def __init__(self, folder, members=1, scheme="http", options=()):
        self._folder, self._scheme, self._options = folder, scheme, tuple(options)
        ports = free_ports(2 * members)
        self.ports, self._peer_ports = ports[:members], ports[members:]
        self.processes = [None] * members
        for number in range(members):
            self.start(number)
        self.wait_ready()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()  # SIGKILL also ends one that is stopped
            process.wait()

    @property
    def address(self):
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number):
        """Starts a member, anew where it was killed."""
        peers = [f"http://127.0.0.1:{port}" for port in self._peer_ports]
        client = f"{self._scheme}://127.0.0.1:{self.ports[number]}"
        command = [
            "etcd", "--name", f"m{number}", "--data-dir", os.path.join(self._folder, f"m{number}"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peers[number], "--initial-advertise-peer-urls", peers[number],
            "--initial-cluster", ",".join(f"m{other}={peer}" for other, peer in enumerate(peers)),
            *self._options,
        ]  # fmt: skip
        with open(os.path.join(self._folder, f"m{number}.log"), "ab") as log:
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def wait_ready(self, timeout_s=60):
        """Until one member answers."""
        if self._scheme != "http":
            return
        deadline_s = time.monotonic() + timeout_s
        while not any(self.ask(number, "kv/range", {"key": "AA=="}) for number in range(len(self.ports))):
            assert time.monotonic() < deadline_s, "no member of etcd came up"
            time.sleep(0.1)

    def ask(self, number, path, body):
        """What a member answers; None where it does not."""
        url = f"http://127.0.0.1:{self.ports[number]}/v3/{path}"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, json.dumps(body).encode(), timeout=5) as answer:
            return json.load(answer)
        return None

    def clear(self):
        """Removes all keys."""
        assert self.ask(0, "kv/deleterange", {"key": "AA==", "range_end": "AA=="})

    def leader(self):
        """Its number."""
        for number in range(len(self.ports)):
            status = self.ask(number, "maintenance/status", {})
            if status and status["leader"] == status["header"]["member_id"]:
                return number
        raise AssertionError("no leader")

    def kill(self, number):
        """As a lost host."""
        self.processes[number].kill()
        self.processes[number].wait()

    def stop(self, number):
        """As a cut network: it keeps its connections and answers nothing."""
        self.processes[number].send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.processes[number].pid, os.WSTOPPED)

    def allow_only(self, user, password, prefix="holmes/"):
        """Asks for a login from now on: root's or `user`'s, who has the keys of this prefix."""
        first, last = (base64.b64encode(text.encode()).decode() for text in (prefix, prefix[:-1] + "0"))
        steps = [
            ("user/add", {"name": "root", "password": "of root"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("role/add", {"name": "job"}),
            ("role/grant", {"name": "job", "perm": {"permType": "READWRITE", "key": first, "range_end": last}}),
            ("user/add", {"name": user, "password": password}),
            ("user/grant", {"user": user, "role": "job"}),
            ("user/add", {"name": "nobody", "password": "x"}),
            ("enable", {}),
        ]
        for path, body in steps:
            assert self.ask(0, f"auth/{path}", body) is not None, path

"""A job's store on a real etcd 3: members lost while a job trains, answers lost on the way, no quorum, wrong logins."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import threading
import time
from http.client import RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from c10d_stores import store_program  # noqa: E402
from elastic import train_elastic  # noqa: E402
from etcd import Etcd, needs_etcd  # noqa: E402
from lossy_proxy import LossyProxy  # noqa: E402
from torch import nn  # noqa: E402
from torch_ranks import run_ranks  # noqa: E402

from holmes.training.recovery import Rules, StoreLostError  # noqa: E402
from holmes.training.recovery.connect import connect_store  # noqa: E402
from holmes.training.recovery.etcd import EtcdAddress, EtcdStore, _reason  # noqa: E402
from holmes.training.recovery.rendezvous import Rendezvous  # noqa: E402
from holmes_comm.errors import HolmesError, UsageError  # noqa: E402

pytestmark = needs_etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    with Etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def store(etcd):
    etcd.clear()
    return client(etcd.address)


def client(address, timeout_s=20.0, job="a"):
    return EtcdStore(EtcdAddress.parse(address), job, timeout_s, timeout_s)


def test_it_does_what_torchs_store_does(store):
    embedded = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert list(store_program(store)) == list(store_program(embedded))
    prefixed = dist.PrefixStore("under", store)  # as process groups use it, from C++
    prefixed.set("key", "value")
    assert (prefixed.get("key"), prefixed.add("n", 2), store.get("under/key")) == (b"value", 2, b"value")


def test_an_addition_counts_once_also_where_its_answer_is_lost(etcd, store):
    with LossyProxy(etcd.ports[0], lost_every=3) as lossy:
        address = f"etcd://127.0.0.1:{lossy.port},127.0.0.1:{lossy.port}"
        clients = [client(address) for _ in range(3)]
        seen = []
        threads = [
            threading.Thread(target=lambda one=one: seen.extend(one.add("n", 1) for _ in range(40))) for one in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert lossy.lost > 20
    assert store.add("n", 0) == 120
    assert sorted(seen) == list(range(1, 121))


def test_keys_are_those_of_the_jobs_lease_which_is_granted_again_where_it_is_over(etcd, store):
    store.set("before", "value")
    leases = etcd.ask(0, "lease/leases", {})["leases"]
    ttl_s = [int(etcd.ask(0, "lease/timetolive", {"ID": lease["ID"]})["grantedTTL"]) for lease in leases]
    assert ttl_s == [86_400] * len(leases)
    for lease in leases:
        assert etcd.ask(0, "lease/revoke", {"ID": lease["ID"]}) is not None
    assert not store.check(["before"])
    store.set("after", "value")
    assert store.add("n", 1) == 1
    assert store.get("after") == b"value"


def train_on(rank, size, _, address, folder, on_step, steps=40, lease_s=5.0):
    """What a rank's job returns, the steps it did, its generations, and how long it took from the end of step 2."""
    done, numbers, times_s = [], [], [time.monotonic()]

    def train(generation):
        numbers.append(generation.number)
        generation.restore(model=nn.Linear(2, 2))
        for step in generation.steps(steps):
            done.append(step)
            if step == 2:
                dist.barrier()
                if generation.rank == 0:
                    on_step()
                times_s.append(time.monotonic())
            time.sleep(0.1)
        return "trained"

    try:
        rules = Rules(size, join_timeout_s=60, lease_s=lease_s)
        value = train_elastic(train, address, folder, place=rank, rules=rules, every_steps=10, timeout_s=60.0)
    except HolmesError as error:
        value = f"{type(error).__name__}: {error}"
    return value, done, numbers, time.monotonic() - times_s[-1]


class Lose:
    """Sends a signal to these processes."""

    def __init__(self, pids, number):
        self._pids, self._number = pids, number

    def __call__(self):
        for pid in self._pids:
            os.kill(pid, self._number)


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_job_goes_on_when_one_of_three_members_is_lost(tmp_path, signal_number):
    with Etcd(tmp_path, 3) as etcd:
        leader = etcd.processes[etcd.leader()].pid  # the hardest one: the others must elect another
        lose = Lose([leader], signal_number)
        said = run_ranks(train_on, 2, etcd.address, str(tmp_path / "run"), lose)
    for value, done, numbers, _ in said:
        assert (value, done, numbers) == ("trained", list(range(40)), [1])


def test_without_a_quorum_a_job_stops_when_its_lease_is_over(tmp_path):
    with Etcd(tmp_path, 3) as etcd:
        lose = Lose([process.pid for process in etcd.processes[:2]], signal.SIGKILL)
        ((value, done, numbers, took_s),) = run_ranks(train_on, 1, etcd.address, str(tmp_path / "run"), lose, 1000, 2.0)
    assert "StoreLostError" in value
    assert "its lease of 2 s is over" in value
    assert "more than half of its members must run" in value
    assert etcd.address in value
    assert numbers == [1]
    assert len(done) < 50
    assert took_s < 30


def refusal(address, kind, timeout_s=3.0):
    """The sentence that says why there is no store, and how long that took."""
    began_s = time.monotonic()
    with pytest.raises(kind) as caught:
        Rendezvous(address, timeout_s)
    assert time.monotonic() - began_s < timeout_s + 2
    text = str(caught.value)
    assert "\n" not in text
    return text


class Hangup(socketserver.BaseRequestHandler):
    """Says nothing; with `resets` the end comes as a reset, as where what was sent had not been read."""

    resets = False

    def handle(self):
        self.request.recv(100)
        if self.resets:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.request.close()


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_that_ends_without_an_answer_may_want_tls(resets):
    handler = type("Handler", (Hangup,), {"resets": resets})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = refusal(f"etcd://127.0.0.1:{server.server_address[1]}", StoreLostError, 1.0)
        server.shutdown()
    assert "closes the connection without an answer, as one does that speaks TLS only (etcds://...)" in said


@pytest.mark.parametrize("error", [ConnectionResetError, RemoteDisconnected, BrokenPipeError])
def test_how_a_connection_ends_is_a_matter_of_time(error):
    assert "closes the connection without an answer, as one does" in _reason(error(errno.EPIPE, "Broken pipe"), False)


class NoEtcd(BaseHTTPRequestHandler):
    """Some web server."""

    def do_POST(self):
        self.send_error(404)

    def log_message(self, *args):
        pass


def test_what_does_not_answer_is_named_within_the_deadline(tmp_path):
    said = refusal("etcd://127.0.0.1:1,127.0.0.1:2", StoreLostError)
    assert "127.0.0.1:1: Connection refused; 127.0.0.1:2: Connection refused" in said
    assert "no member of etcd answers within 3 s" in said
    with ThreadingHTTPServer(("127.0.0.1", 0), NoEtcd) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        assert "no v3 gateway of an etcd 3.4 or later there (HTTP 404" in refusal(
            f"etcd://127.0.0.1:{other.server_port}", StoreLostError
        )
        other.shutdown()
    with Etcd(tmp_path, 3) as etcd:
        etcd.kill(0)
        etcd.kill(1)
        assert "more than half of its members must run" in refusal(etcd.address, StoreLostError)
        etcd.stop(2)
        assert f"127.0.0.1:{etcd.ports[2]}: no answer" in refusal(etcd.address, StoreLostError)


def dripping(at_once):
    """A member that answers so many bytes at once and the rest one by one, for longer than anybody waits."""

    class Dripping(BaseHTTPRequestHandler):
        def do_POST(self):
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: 200\r\n\r\n{".ljust(250)
            with contextlib.suppress(OSError):  # nobody waits any more
                self.wfile.write(answer[:at_once])
                for byte in answer[at_once:]:
                    time.sleep(0.05)
                    self.wfile.write(bytes([byte]))

        def log_message(self, *args):
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Dripping)


@pytest.mark.parametrize("at_once", [0, 50], ids=["head", "body"])
def test_an_answer_that_drips_counts_as_none_at_the_deadline(store, etcd, at_once):
    with dripping(at_once) as member:
        threading.Thread(target=member.serve_forever, daemon=True).start()
        address = f"etcd://127.0.0.1:{member.server_port}"
        assert f"127.0.0.1:{member.server_port}: no answer" in refusal(address, StoreLostError)
        for order in itertools.permutations([str(member.server_port), str(etcd.ports[0])]):
            both = client("etcd://" + ",".join(f"127.0.0.1:{port}" for port in order))
            both.set("key", "value")
            assert both.get("key") == b"value"
        member.shutdown()


def test_a_wrong_login_is_refused_in_a_sentence_that_does_not_show_it(tmp_path):
    with Etcd(tmp_path) as etcd:
        where = etcd.address.removeprefix("etcd://")
        said = refusal(f"etcd://job:secret@{where}", UsageError)
        assert "refuses the user 'job'" in said
        assert "auth enable" in said
        etcd.allow_only("job", "s@cret")
        rendezvous = Rendezvous(f"etcd://job:s%40cret@{where}", 10, job="a")
        assert rendezvous.settle("name", "value") == "value"
        assert rendezvous.address == etcd.address
        refused = {
            f"etcd://job:guess@{where}": "refuses the user 'job'",
            f"etcd://{where}": "asks for a login",
            f"etcd://nobody:x@{where}": "the user 'nobody' may not read and write the job's keys",
        }
        for address, expected in refused.items():
            said = refusal(address, UsageError)
            assert expected in said
            assert "guess" not in said
        etcd.kill(0)
        etcd.start(0)
        assert rendezvous.settle("name", "other") == "value"  # with a new token: the member has forgotten the old one


@pytest.mark.parametrize("address", ["etcd://", "etcd://head", "etcd://head:2379,", "etcd://head:0", "etcd://h:1,:2"])
def test_a_malformed_address_says_its_form(address):
    with pytest.raises(UsageError, match=r"must be host:port, .* or etcd://host:port"):
        connect_store(address, "a", 1.0, 1.0)


def test_a_malformed_login_is_not_shown():
    with pytest.raises(UsageError, match=r"must be user:password") as caught:
        connect_store("etcd://hunter2@head:2379", "a", 1.0, 1.0)
    assert "hunter2" not in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command, which makes the certificate")
def test_over_tls_it_trusts_only_certificates_of_known_authorities(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=etcd",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    options = ("--cert-file", str(certificate), "--key-file", str(key))
    with Etcd(tmp_path, scheme="https", options=options) as etcd:
        address = etcd.address.replace("etcd://", "etcds://")
        assert "CERTIFICATE_VERIFY_FAILED" in refusal(address, StoreLostError)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        store = client(address)
        store.set("key", "value")
        assert store.get("key") == b"value"
        assert "one does that speaks TLS only (etcds://...)" in refusal(etcd.address, StoreLostError)

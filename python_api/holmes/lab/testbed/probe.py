"""One end of a measured path, run by path on an emulated node: `check` starts a receiver and a sender.

Standard library only, in isolated mode.

    probe.py receive ADDRESS                    prints "listening"; answers pings, counts datagrams, until it is killed
    probe.py send ADDRESS SETTINGS              SETTINGS, as JSON, are `Sending`; prints what was measured as JSON
"""

import contextlib
import json
import os
import re
import socket
import statistics
import struct
import sys
import threading
import time
from typing import Any

PING_PORT, COUNT_PORT, CONTROL_PORT = 7100, 7101, 7102
HEADERS = 42  # Ethernet, IPv4, UDP: what a link's rate counts beside a datagram
SMALL = 200
SO_TIMESTAMPNS = 64  # of 64 bits on every machine (SO_TIMESTAMPNS_NEW, Linux 5.1)
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
MOST_SEGMENTS = 64
MOST_SUPER_PACKET_BYTES = 15000
FIRST_PINGS, PINGS, PING_EVERY_S = 10, 50, 0.02
SETTLE_S = 0.3
START_S = 0.2  # of a flood, until the link's bucket and queue are full
BUFFER_BYTES = 1 << 23  # or what net.core.rmem_max allows


class Counter:
    """What has come since the last reset: datagrams, and bytes over time."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        with contextlib.suppress(OSError):  # before Linux 5.0
            self.socket.setsockopt(SOL_UDP, UDP_GRO, 1)
        self.socket.bind((address, COUNT_PORT))
        self.reset(SMALL)

    def reset(self, payload: int) -> None:
        """Begins again, with datagrams of this size."""
        self.payload = payload
        self.datagrams = 0
        self.history: list[tuple[float, int]] = []  # when how many datagrams had come

    def run(self) -> None:
        """Counts for ever."""
        buffer = bytearray(1 << 16)
        while True:
            received, extra, _, _ = self.socket.recvmsg_into([buffer], 64)
            self.datagrams += -(-received // self.payload)  # many at once are a multiple of it, but for the last
            # When the kernel had it: this process may have been asleep then.
            seconds, nanoseconds = struct.unpack("qq", extra[0][2])
            self.history.append((seconds + nanoseconds / 1e9, self.datagrams))

    def read(self) -> dict[str, Any]:
        """The datagrams, and the bits per second from `START_S` after the first to the last (0: too few for that)."""
        history = self.history[:]
        begin = next((index for index, (when, _) in enumerate(history) if when >= history[0][0] + START_S), None)
        bits_per_s = 0.0
        if begin is not None and history[-1][0] > history[begin][0]:
            datagrams = history[-1][1] - history[begin][1]
            bits_per_s = datagrams * (self.payload + HEADERS) * 8 / (history[-1][0] - history[begin][0])
        return {"datagrams": self.datagrams, "bits_per_s": bits_per_s, "dropped": self.dropped()}

    def dropped(self) -> int:
        """What came while this process was too slow to take it, since the socket was made."""
        with open("/proc/self/net/udp", encoding="ascii") as table:
            rows = [line.split() for line in table][1:]
        return sum(int(row[-1]) for row in rows if row[1].endswith(f":{COUNT_PORT:04X}"))


def echo(address: str) -> None:
    """Answers every datagram."""
    answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    answering.bind((address, PING_PORT))
    while True:
        data, peer = answering.recvfrom(100)
        answering.sendto(data, peer)


def receive(address: str) -> None:
    """Serves one sender."""
    counter = Counter(address)
    for target in (lambda: echo(address), counter.run):
        threading.Thread(target=target, daemon=True).start()
    with socket.create_server((address, CONTROL_PORT)) as server:
        print("listening", flush=True)
        control = server.accept()[0].makefile("rw")
    for line in control:
        request = json.loads(line)
        if "reset" in request:
            counter.reset(request["reset"])
        control.write(json.dumps(counter.read()) + "\n")
        control.flush()


class Control:
    """The receiver's counter, seen from the sender."""

    def __init__(self, address: str) -> None:
        self.file = socket.create_connection((address, CONTROL_PORT)).makefile("rw")

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer."""
        self.file.write(json.dumps(request) + "\n")
        self.file.flush()
        answer: dict[str, Any] = json.loads(self.file.readline())
        return answer


def find(asking: socket.socket, wait_s: float) -> None:
    """Sends until something is answered, or not any more: the question for the other's address may be lost too."""
    asking.settimeout(1 + wait_s)
    for _ in range(FIRST_PINGS):
        asking.send(b"first")
        with contextlib.suppress(TimeoutError):
            asking.recv(100)
            return


def ping_ms(address: str, wait_s: float) -> list[float]:
    """The round trips of those pings whose answer came within `wait_s` of the last one."""
    asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asking.connect((address, PING_PORT))
    sent_s: dict[bytes, float] = {}
    took_ms = []

    def take(until_s: float) -> None:
        while (left_s := until_s - time.monotonic()) > 0:
            asking.settimeout(left_s)
            try:
                answer = asking.recv(100)
            except TimeoutError:
                return
            if answer in sent_s:
                took_ms.append(1000 * (time.monotonic() - sent_s[answer]))

    find(asking, wait_s)
    for number in range(PINGS):
        ping = str(number).encode()
        sent_s[ping] = time.monotonic()
        asking.send(ping)
        take(sent_s[ping] + PING_EVERY_S)
    take(time.monotonic() + wait_s)
    return took_ms


def can_cut() -> bool:
    """Whether the kernel cuts datagrams for us also where a packet socket is between (Linux 6.2)."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (6, 2)


def send_datagrams(address: str, payload: int, bits_per_s: float, seconds: float) -> int:
    """Sends datagrams at a rate, or as the link takes them where that is slower; returns how many."""
    sending = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sending.connect((address, COUNT_PORT))
    together = 1
    if can_cut():
        sending.setsockopt(SOL_UDP, UDP_SEGMENT, payload)
        together = max(1, min(MOST_SEGMENTS, MOST_SUPER_PACKET_BYTES // payload))
    data = bytes(payload * together)
    every_s = together * (payload + HEADERS) * 8 / bits_per_s
    begin_s = now_s = time.monotonic()
    sent = 0
    while now_s < begin_s + seconds:
        if (early_s := begin_s + sent * every_s - now_s) > 0:
            time.sleep(early_s)
        sending.send(data)
        sent += 1
        now_s = time.monotonic()
    return sent * together


def send(address: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Measures; see `check.CheckedPath` for what is returned, or {"unreachable": why} where nothing comes through."""
    wait_s = settings["round_trip_ms"] / 1000 * 1.5 + SETTLE_S
    try:
        took_ms = ping_ms(address, wait_s)
        control = Control(address)
    except OSError as error:
        return {"unreachable": str(error)}
    found: dict[str, Any] = {"round_trip_ms": statistics.median(took_ms) if took_ms else None, "gbps": None}
    if settings["gbps"] is not None:
        payload = settings["mtu"] - HEADERS + 14
        control.ask(reset=payload)
        send_datagrams(address, payload, 1.25e9 * settings["gbps"], settings["seconds"] + START_S)
        time.sleep(wait_s + settings["queue_s"])
        found["gbps"] = control.ask()["bits_per_s"] / 1e9
    before = control.ask(reset=SMALL)["dropped"]
    sent = send_datagrams(address, SMALL, settings["loss_bits_per_s"], settings["seconds"])
    time.sleep(wait_s)
    counted = control.ask()
    return {
        **found,
        "loss_percent": 100 * (1 - counted["datagrams"] / sent),
        "packets": sent,
        "dropped_by_receiver": counted["dropped"] - before,
    }


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        print(json.dumps(send(sys.argv[2], json.loads(sys.argv[3]))))

"""Virtual hosts have what hosts have, and lose it as hosts do."""

import subprocess
import sys
import time

import pytest

from nanotrain_core.testing.virtual_hosts import Network, not_here

WHY_NOT = not_here()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

LISTEN = """
import socket
server = socket.create_server(("host1", 5000))
print("ready", flush=True)
connection, _ = server.accept()
received = 0
while data := connection.recv(1 << 20):
    received += len(data)
print(received)
"""
SEND = """
import socket, sys, time
began = time.monotonic()
connection = socket.create_connection(("host1", 5000), timeout=float(sys.argv[1]))
print(time.monotonic() - began)
connection.sendall(bytes(1 << 20))
"""


def start(host, folder, program, *words):
    command = [*host.words(folder), sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def listening(host, folder):
    server = start(host, folder, LISTEN)
    assert server.stdout.readline() == "ready\n"
    return server


def test_packets_take_as_long_as_they_should_and_all_bytes_arrive(tmp_path):
    with Network(2, delay=0.1, loss=0.05, seed=1) as network:
        server = listening(network.hosts[1], tmp_path)
        out, errors = start(network.hosts[0], tmp_path, SEND, "20").communicate(timeout=60)
        assert errors == ""
        assert float(out) >= 0.2, "there and back"
        assert server.communicate(timeout=60)[0] == f"{1 << 20}\n"


def test_parted_hosts_do_not_reach_each_other_until_they_may(tmp_path):
    with Network(2) as network:
        server = listening(network.hosts[1], tmp_path)
        network.part([0], [1])
        assert "timed out" in start(network.hosts[0], tmp_path, SEND, "0.5").communicate(timeout=60)[1]
        network.heal()
        assert start(network.hosts[0], tmp_path, SEND, "20").communicate(timeout=60)[1] == ""
        assert server.communicate(timeout=60)[0] == f"{1 << 20}\n"


def test_a_host_that_vanishes_takes_its_processes_along_and_is_replaced_empty(tmp_path):
    with Network(2) as network:
        mark = ["sh", "-c", "hostname; echo > /dev/shm/mark; ls /dev/shm; exec sleep 1000"]
        process = subprocess.Popen(
            [*network.hosts[1].words(tmp_path), *mark], stdout=subprocess.PIPE, text=True
        )
        assert [process.stdout.readline() for _ in range(2)] == ["host1\n", "mark\n"]
        began = time.monotonic()
        network.vanish(1)
        process.wait(timeout=60)
        assert time.monotonic() - began < 30
        there = [*network.replace(1).words(tmp_path), "sh", "-c", "hostname; ls /dev/shm"]
        assert subprocess.run(there, capture_output=True, text=True, check=True).stdout == "host1\n"

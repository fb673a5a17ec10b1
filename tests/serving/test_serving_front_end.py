"""HAProxy with Ray's configuration and the example's changes, in front of servers that fail.

A request whose replica dies must get a status from `docs/serving.md`. Whole services are killed in
`test_serving_engine.py`; here, every order of events is certain.
"""

import contextlib
import http.client
import itertools
import pathlib
import re
import socket
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from processes import until

from examples.serving import local, wire
from examples.serving.settings import Settings

with warnings.catch_warnings():
    # Ray's own, of pydantic.
    warnings.simplefilter("ignore")
    from ray.serve._private import haproxy
    from ray.serve.config import HTTPOptions

#: A replica takes four requests at a time.
SETTINGS = Settings(users=(2,), concurrent=1, sticky=True, timeout_ms=500, body_s=0.1)
MOST = 4
#: What Ray reads from variables of these names.
TEXTS = ["socket_path", "server_state_base", "server_state_file", "balance_algorithm", "retry_on"]
NUMBERS = ["metrics_port", "stats_port", "nbthread", "timeout_client_s", "retries"]
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s"


class Replica:
    """A server at a port of its own.

    Attributes:
      name: what it answers with.
      does: what it does with a request: "answer", "hold" it, "close" the connection, or answer
        with "half" of a body.
      held: the connections of requests that it holds.
    """

    def __init__(self, name: str) -> None:
        self.name, self.does = name, "answer"
        self.held: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        # HAProxy closes connections, too.
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
            while line := stream.readline():
                head = b"".join(iter(stream.readline, b"\r\n")).lower()
                length = re.search(rb"content-length: (\d+)", head)
                stream.read(int(length[1]) if length else 0)
                does = "answer" if b"/-/healthz" in line else self.does
                if does == "hold":
                    self.held.append(connection)
                    # The other end closes the connection, or `die` does.
                    stream.read(1)
                if does == "answer":
                    connection.sendall(ANSWER % (len(self.name), self.name.encode()))
                elif does == "half":
                    connection.sendall(ANSWER % (1000, b"half"))
                if does != "answer" or b"connection: close" in head:
                    return

    def die(self) -> None:
        for one in (self.listener, *self.held):
            with contextlib.suppress(OSError):  # It is closed already.
                one.shutdown(socket.SHUT_RDWR)
        self.listener.close()


class Answer(NamedTuple):
    """What a client sees."""

    status: int
    body: bytes
    retry_after: str | None


class Front:
    """Two replicas, with HAProxy in front of them, started as Ray starts it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.port, self.replicas = local.free_port(), [Replica("a"), Replica("b")]
        self.threads, self.clients = ThreadPoolExecutor(16), contextlib.ExitStack()
        given = local.ENVIRONMENT | local._haproxy(str(folder), SETTINGS)
        values = {name.removeprefix("RAY_SERVE_HAPROXY_"): x for name, x in given.items()}
        # Ray itself reads the environment, once, when it is imported.
        configuration = haproxy.HAProxyConfig(
            **{name: values[name.upper()] for name in TEXTS},
            **{name: int(values[name.upper()]) for name in NUMBERS},
            metrics_enabled=False,
            has_received_routes=True,
            is_head=True,
            bufsize=int(values["TUNE_BUFSIZE"]),
            http_options=HTTPOptions(host="127.0.0.1", port=self.port),
        )
        servers = [haproxy.ServerConfig(one.name, "127.0.0.1", one.port) for one in self.replicas]
        backends = {"http-a": haproxy.BackendConfig("http-a", "/", servers=servers)}
        written = haproxy.HAProxyApi(configuration, backends, values["CONFIG_FILE_LOC"])
        written._generate_config_file_internal()
        command = [values["BINARY_PATH"], "-db", "-f", values["CONFIG_FILE_LOC"]]
        with (folder / "errors").open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=errors, stderr=errors)
        self.socket = pathlib.Path(values["SOCKET_PATH"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for replica in self.replicas:
            replica.die()
        self.threads.shutdown()
        self.clients.close()

    def ask(self, client: http.client.HTTPConnection, user: str, size: int = 2) -> Answer:
        client.request("POST", "/rank", b"x" * size, {wire.SESSION: user})
        answer = client.getresponse()
        return Answer(answer.status, answer.read(), answer.getheader("Retry-After"))

    def client_of(self, replica: Replica) -> tuple[http.client.HTTPConnection, str]:
        """A connection that was used before, and a user whose requests go to a replica."""
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        self.clients.callback(client.close)
        users = map(str, itertools.count())
        return client, next(x for x in users if self.ask(client, x).body == replica.name.encode())

    def hold(self, replica: Replica, *clients: tuple[Any, str]) -> list[Future[Answer]]:
        """Requests that a replica does not answer."""
        replica.does = "hold"
        asked = [self.threads.submit(self.ask, client, user) for client, user in clients]
        assert until(lambda: len(replica.held) == len(asked), 20)
        return asked


@pytest.fixture
def front(monkeypatch) -> Iterator[Front]:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    # HAProxy takes paths of sockets of at most 97 bytes; pytest's folders may have longer ones.
    with tempfile.TemporaryDirectory(prefix="front-", dir="/tmp") as folder:
        front = Front(pathlib.Path(folder))
        try:
            assert until(front.socket.exists, 20)
            yield front
        finally:
            front.end()


def test_a_replica_dies_while_the_other_one_is_full_and_then_that_one(front):
    """HAProxy gives the first request up after 20 ms in a queue, the others without a server."""
    dying, full = front.replicas
    client = front.client_of(dying)
    others = front.hold(full, *(front.client_of(full) for _ in range(MOST)))
    (asked,) = front.hold(dying, client)
    dying.die()
    answer = asked.result()
    assert (answer.status, answer.body.decode(), answer.retry_after) == (503, local.FULL, "1")
    full.die()
    assert {(one.result().status, one.result().retry_after) for one in others} == {(503, "1")}


@pytest.mark.parametrize(
    ("does", "size", "status"),
    [
        ("close", 2, 502),
        # More than HAProxy can send again.
        ("close", 100_000, 502),
        ("half", 2, 502),
        ("hold", 2, 504),
    ],
)
def test_no_replica_answers(front, does, size, status):
    client, user = front.client_of(front.replicas[0])
    for replica in front.replicas:
        replica.does = does
    assert front.ask(client, user, size).status == status

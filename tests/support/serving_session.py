"""One session of the service in a process of its own; prints what happened as JSON.

Usage: serving_session.py CACHE. All checks on what it prints are in `test_serving_engine.py`.
"""

import asyncio
import collections
import functools
import json
import os
import pathlib
import signal
import sys
import time
import types
from typing import Any

import aiohttp
import numpy as np
import serving_oracle

from examples.serving import load, local, models, plans, wire
from examples.serving.settings import Settings

#: Rounding of float32 in another order of sums.
TOLERANCE = 1e-5
MOST = 32


def settings(cache: str) -> Settings:
    return Settings(
        source="tiny",
        cache=cache,
        # Few programs: both replicas compile them.
        candidates=(MOST,),
        users=(4,),
        new_users=(4,),
        user_bytes=200_000,
        wait_ms=2,
        replicas=(2,),
        # No reservation: the test must pass where there is one core.
        cpus=0,
        ongoing=8,
        queued=16,
        timeout_ms=30_000,
        sticky=True,
        health_s=1,
    )


class Session:
    def __init__(self, service: local.Service) -> None:
        self.service, self.url = service, service.url
        self.source = models.SOURCES["tiny"]()
        self.offline: dict[str, serving_oracle.Offline] = {}
        self.errors: collections.Counter[str] = collections.Counter()
        trace = aiohttp.TraceConfig()
        trace.on_request_exception.append(self.failed)
        # The load's own session, so that a request without a status can say why.
        traced: Any = functools.partial(aiohttp.ClientSession, trace_configs=[trace])
        module: Any = load
        module.aiohttp = types.SimpleNamespace(**vars(aiohttp) | {"ClientSession": traced})

    async def failed(self, session: Any, context: Any, request: Any) -> None:
        self.errors[repr(request.exception)] += 1

    def plan(self, **changes: Any) -> plans.Plan:
        fields = {"rate": 15, "seconds": 4, "users": 100, "items": 200, "fewest": 1, "most": MOST}
        return plans.Plan(**(fields | {"retries": 12} | changes))

    def outcome(self, told: list[load.Told]) -> dict[str, Any]:
        """Counts of a run; every answer is compared with its scores without a scorer."""
        wrong = 0
        for one in told:
            if one.scores is None:
                continue
            if one.weights not in self.offline:
                self.offline[one.weights] = serving_oracle.Offline(self.source, one.weights)
            # Padded to one size: the oracle compiles once.
            items = np.resize(one.asked.items, MOST)
            expected = self.offline[one.weights].scores(one.asked.user, items)
            found = one.scores
            size = len(one.asked.items)
            wrong += len(found) != size or not np.allclose(
                found, expected[:size], rtol=TOLERANCE, atol=TOLERANCE
            )
        return {
            "asked": len(told),
            "statuses": collections.Counter(str(one.status) for one in told),
            "wrong": int(wrong),
            "weights": sorted({one.weights for one in told}),
            "replicas": len({one.replica for one in told if one.replica}),
            "replicas_of_users": len(
                {(one.asked.user, one.replica) for one in told if one.replica}
            ),
            "users": len({one.asked.user for one in told if one.replica}),
            "retried": sum(one.tries > 1 for one in told),
            "errors": dict(self.errors),
        }

    async def division(self) -> list[str]:
        """The replicas to which the balancer gives the first 20 users now; "" for an error."""
        found = []
        async with aiohttp.ClientSession() as session:
            for user in range(20):
                headers = {wire.SESSION: str(user)}
                async with session.get(f"{self.url}/metrics", headers=headers) as answer:
                    good = answer.status == 200
                    found.append((await answer.json())["replica"] if good else "")
        return found

    async def settled(self, limit_s: float = 60) -> list[str]:
        """The division among two replicas, as soon as it stays the same for 2 s.

        The balancer divides users anew when it hears of a replica.
        """
        end = time.monotonic() + limit_s
        last, since = await self.division(), time.monotonic()
        while len(set(last)) != 2 or "" in last or time.monotonic() < since + 2:
            assert time.monotonic() < end, f"users go to other replicas after {limit_s} s: {last}"
            await asyncio.sleep(0.2)
            if (found := await self.division()) != last:
                last, since = found, time.monotonic()
        return last

    async def both_forms(self) -> dict[str, Any]:
        found = {}
        for binary in (False, True):
            # Again if the balancer divided the users anew meanwhile: on a busy machine, a replica
            # may miss its health checks.
            for _ in range(5):
                before = await self.settled()
                told = await load.send(self.url, self.plan(binary=binary, seed=binary, seconds=2))
                if await self.division() == before:
                    break
            found["binary" if binary else "json"] = self.outcome(told)
        return found

    async def swap(self) -> dict[str, Any]:
        sending = asyncio.create_task(load.send(self.url, self.plan(seed=2)))
        await asyncio.sleep(1.5)
        await asyncio.to_thread(self.service.deploy, "2")
        told = await sending
        # Requests after the swap have the new weights alone.
        told += (after := await load.send(self.url, self.plan(seed=3, seconds=1)))
        found = self.outcome(told) | {"after": sorted({one.weights for one in after})}
        refused = ""
        try:
            await asyncio.to_thread(self.service.deploy, "no version")
        except ValueError as error:
            refused = str(error)
        told = await load.send(self.url, self.plan(seed=4, seconds=1))
        return found | {"wrong_version": self.outcome(told) | {"refused": refused}}

    async def kill(self, number: int, **changes: Any) -> dict[str, Any]:
        before = await load.metrics(self.url, 2)
        sending = asyncio.create_task(load.send(self.url, self.plan(seed=4, rate=60, **changes)))
        await asyncio.sleep(1.5)
        for fields in list(before.values())[:number]:
            os.kill(fields["pid"], signal.SIGKILL)
        found = self.outcome(await sending)
        # The engine starts other replicas.
        end = time.monotonic() + 120
        while time.monotonic() < end:
            after = await load.metrics(self.url, 2, limit_s=3)
            if len(after) == 2:
                break
        return found | {
            "replicas_after": len(after),
            "same": len(before.keys() & after.keys()),
            "current": [fields["weights"] for fields in after.values()],
        }

    async def raw(self, head: str, body: str = "") -> tuple[int, bool]:
        """Status of the answer to bytes, and whether the connection is closed within 15 s."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        writer.write(f"{head}\r\nHost: a\r\n\r\n{body}".encode())
        status = int((await reader.readline()).split()[1])
        try:
            await asyncio.wait_for(reader.read(), 15)
        except TimeoutError:
            return status, False
        finally:
            writer.close()
        return status, True

    async def strangers(self) -> dict[str, Any]:
        """Clients that no library has written; some keep more connections than a replica takes."""
        upgrade = "GET /rank HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket"
        upgrade += "\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13"
        length = "POST /rank HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 50"
        slow = [asyncio.create_task(self.raw(length, "{")) for _ in range(60)]
        await asyncio.sleep(0.5)
        meanwhile = self.outcome(await load.send(self.url, self.plan(seed=7, seconds=1)))
        return {
            "statuses": meanwhile["statuses"],
            "slow": sorted(set(await asyncio.gather(*slow))),
            "upgrade": (await self.raw(upgrade))[0],
            "no_path": (await self.raw("OPTIONS * HTTP/1.1"))[0],
        }

    async def front_end(self) -> dict[str, Any]:
        """What becomes of HAProxy, and of requests, when it is killed; seconds to an answer."""
        # A second one may still end the connections of its configuration, before the last change.
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            if str(self.service.folder).encode() in (line := path.read_bytes()) and b"-db" in line:
                os.kill(int(path.parent.name), signal.SIGKILL)
        start, told = time.monotonic(), []
        while time.monotonic() < start + 100:
            told += (newest := await load.send(self.url, self.plan(rate=4, seconds=1, retries=0)))
            if newest and all(one.status == 200 for one in newest):
                break
        return self.outcome(told) | {"seconds": time.monotonic() - start}

    async def drain(self) -> dict[str, Any]:
        """Requests that are under way when the service is to end."""
        sending = asyncio.create_task(
            load.send(self.url, self.plan(rate=200, seconds=0.5, seed=6, retries=0))
        )
        await asyncio.sleep(0.4)
        await asyncio.to_thread(self.service.drain)
        return self.outcome(await sending)

    async def overload(self) -> dict[str, Any]:
        """Far more requests at once than may wait."""
        plan = self.plan(rate=3000, seconds=0.1, seed=5, retries=0)
        return self.outcome(await load.send(self.url, plan))

    async def all(self) -> dict[str, Any]:
        return {
            "forms": await self.both_forms(),
            "swap": await self.swap(),
            "overload": await self.overload(),
            # Before a replica is killed: its replacement has counts of its own.
            "metrics": await load.metrics(self.url, 2),
            "strangers": await self.strangers(),
            "kill": await self.kill(1),
            "metrics_of_replacement": await load.metrics(self.url, 2),
            "kill_all": await self.kill(2, retries=0),
            "front_end": await self.front_end(),
            "drain": await self.drain(),
        }


def main() -> None:
    local.prepare()
    before = {name: x for name, x in os.environ.items() if "HAPROXY" in name}
    with local.Service(settings(sys.argv[1])) as service:
        found = asyncio.run(Session(service).all())
    # Otherwise another service of this process would look for HAProxy in a folder that is gone.
    assert {name: x for name, x in os.environ.items() if "HAPROXY" in name} == before
    print(json.dumps(found))


if __name__ == "__main__":
    main()

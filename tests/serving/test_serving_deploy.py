"""Other weights for a service that runs, without an engine."""

import types
import warnings
from typing import Any

import pytest

from examples.serving import load, local
from examples.serving.settings import Settings

with warnings.catch_warnings():
    # Ray's own, of pydantic.
    warnings.simplefilter("ignore")
    from ray import serve
    from ray.serve import context
    from ray.serve.schema import ApplicationStatus


def test_weights_that_one_replica_refuses_leave_all_replicas_with_the_old_ones(monkeypatch):
    """A replica may have no memory for weights that the check in another process has read."""
    monkeypatch.setattr(local, "prepare", list)
    service = local.Service(Settings(source="tiny", weights="1"))
    replicas, full = {"a": "1", "b": "1"}, {"b"}
    deployed: list[str] = []

    def apply(limit_s: float) -> None:
        deployed.append(service.weights)
        replicas.update(dict.fromkeys(replicas.keys() - full, service.weights))

    async def metrics(url: str, number: int) -> dict[str, dict[str, str]]:
        refused = {"a": "", "b": "weights 2: no memory"}
        return {name: {"refused_weights": refused[name]} for name in list(refused)[:number]}

    monkeypatch.setattr(service, "_check", str)
    monkeypatch.setattr(service, "_apply", apply)
    # More than the settings' least number: the service has grown.
    monkeypatch.setattr(service, "_running", lambda: len(replicas))
    monkeypatch.setattr(load, "metrics", metrics)
    with pytest.raises(ValueError, match="weights 2: no memory"):
        service.deploy("2")
    assert (deployed, service.weights, set(replicas.values())) == (["2", "1"], "1", {"1"})


def test_a_replica_that_dies_during_a_swap_does_not_end_the_service(monkeypatch):
    """Ray calls the deployment failed until it has replaced the replica."""

    def statuses(*pairs: tuple[str, str]) -> None:
        left = list(pairs)

        def status() -> Any:
            name, trigger = left.pop(0)
            deployment = types.SimpleNamespace(status_trigger=trigger, message=trigger)
            found = types.SimpleNamespace(
                status=ApplicationStatus(name), message="", deployments={"Ranking": deployment}
            )
            return types.SimpleNamespace(applications={"ranking": found})

        monkeypatch.setattr(serve, "status", status)

    client = types.SimpleNamespace(deploy_apps=lambda schema: None)
    monkeypatch.setattr(context, "_get_global_client", lambda: client)
    monkeypatch.setattr(local, "prepare", list)
    service = local.Service(Settings(source="tiny", weights="1"))
    statuses(("DEPLOYING", ""), ("DEPLOY_FAILED", "HEALTH_CHECK_FAILED"), ("RUNNING", ""))
    service.deploy()
    # A replica that cannot start is no such replica.
    statuses(("DEPLOY_FAILED", "REPLICA_STARTUP_FAILED"))
    with pytest.raises(RuntimeError, match="DEPLOY_FAILED: .*REPLICA_STARTUP_FAILED"):
        service.deploy()

"""Trains the ranker, in one of its versions, with checkpoints from which a run can be resumed."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import ikbo_jax as ikbo
from examples.movielens import evaluate
from examples.movielens.checkpoints import Checkpoints
from examples.movielens.impressions import Batch, Impressions
from examples.movielens.model import Catalogue, Ranker, Sizes
from examples.movielens.plain import PlainRanker
from examples.movielens.progress import Progress

#: Versions of the ranker, with their descriptions.
VERSIONS = {
    "ikbo": "this library's ops",
    "plain": "plain JAX, every user copied to its candidates",
    "rewrite": "`ikbo.rewrite` of the plain one",
}
#: Requests of a batch when a model is evaluated.
EVALUATED = 16
#: While a model is trained, every fourth request of the validation part is evaluated.
VALIDATED = 4


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a run trains.

    Attributes:
      steps: number of steps.
      users: requests of a step.
      learning_rate: peak of the learning rate, after a tenth of the steps; its end is 0.
      weight_decay: decay of AdamW.
      evaluate_every: steps between two evaluations on the validation part.
      save_every: steps between two checkpoints.
      dtype: name of the dtype of computation; parameters and moments are float32.
    """

    steps: int = 1100
    users: int = 8
    learning_rate: float = 1e-2
    weight_decay: float = 1e-2
    evaluate_every: int = 275
    save_every: int = 275
    dtype: str = "float32"


class State(NamedTuple):
    """What a step changes: the number of steps done, parameters, and the optimiser's state."""

    step: jax.Array
    params: Any
    optimiser: Any


class Network(NamedTuple):
    """A version of the ranker as a function.

    Attributes:
      logits: takes parameters and a batch; returns logits [B] f32. It can be traced.
      start: takes a seed; returns the initial parameters, which are those of all versions.
    """

    logits: Callable[[Any, Batch], jax.Array]
    start: Callable[[int], Any]


def network(version: str, sizes: Sizes, catalogue: Catalogue) -> Network:
    """The version `version` of `VERSIONS`; raises ValueError if there is none of this name."""
    if version not in VERSIONS:
        raise ValueError(f"unknown version {version!r}; known: {', '.join(VERSIONS)}")
    kind = Ranker if version == "ikbo" else PlainRanker
    graph, _, *features = nnx.split(kind(sizes, catalogue, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def logits(params: Any, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, params, *features)
        return model(batch.users, batch.candidates, batch.cand_to_user, indices_are_sorted=True)

    def start(seed: int) -> Any:
        return nnx.state(kind(sizes, catalogue, rngs=nnx.Rngs(seed)), nnx.Param)

    return Network(ikbo.rewrite(logits) if version == "rewrite" else logits, start)


def optimiser(protocol: Protocol) -> optax.GradientTransformation:
    """AdamW, whose learning rate rises linearly and falls with a cosine."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, protocol.learning_rate, max(1, protocol.steps // 10), protocol.steps
    )
    return optax.adamw(schedule, weight_decay=protocol.weight_decay)


def start(net: Network, protocol: Protocol, seed: int) -> State:
    """The state before the first step."""
    params = net.start(seed)
    return State(jnp.zeros((), jnp.int32), params, optimiser(protocol).init(params))


def rounded(net: Network, protocol: Protocol) -> Callable[[Any, Batch], jax.Array]:
    """The network's logits, of float32 parameters that are rounded to the dtype of computation."""
    dtype = jnp.dtype(protocol.dtype)

    def logits(params: Any, batch: Batch) -> jax.Array:
        return net.logits(jax.tree.map(lambda x: x.astype(dtype), params), batch)

    return logits


def step_of(net: Network, protocol: Protocol) -> Callable[[State, Batch], tuple[State, jax.Array]]:
    """A step: takes state and batch; returns the next state and the mean log loss."""
    rule, logits_of = optimiser(protocol), rounded(net, protocol)

    def loss(params: Any, batch: Batch) -> jax.Array:
        logits = logits_of(params, batch)
        return jnp.mean(jax.nn.softplus(logits) - batch.label * logits)

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        updates, moments = rule.update(gradients, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        return State(state.step + 1, params, moments), value

    return step


class Run(NamedTuple):
    """A finished run.

    Attributes:
      params: the trained parameters.
      loss: the loss of every step.
      validation: (step, AUC, NDCG) of every evaluation.
      test: metrics of the test part.
    """

    params: Any
    loss: list[float]
    validation: list[tuple[int, float, float]]
    test: evaluate.Metrics


class Trainer:
    """Trains one version; its compiled programs serve several seeds.

    Args:
      version: key of `VERSIONS`.
      sizes: sizes of the ranker.
      data: the data.
      protocol: how to train.
    """

    def __init__(self, version: str, sizes: Sizes, data: Impressions, protocol: Protocol):
        self.version, self.sizes, self.data, self.protocol = version, sizes, data, protocol
        self.network = network(version, sizes, data.data.catalogue)
        self._step = jax.jit(step_of(self.network, protocol), donate_argnums=0)
        self._logits = jax.jit(rounded(self.network, protocol))

    def lower_step(self, batch: Batch) -> Any:
        """The step for batches of this size, ready to be compiled."""
        shapes = jax.eval_shape(lambda: start(self.network, self.protocol, 0))
        return self._step.lower(shapes, batch)

    def run(
        self,
        seed: int,
        folder: pathlib.Path | None = None,
        progress: Progress | None = None,
        until: int | None = None,
    ) -> Run:
        """Trains with a seed, from the newest checkpoint in `folder` if there is one.

        Args:
          seed: seed of initial parameters, order of requests and sampled movies.
          folder: folder of checkpoints; None saves none.
          progress: shows loss and metrics.
          until: stops after this step, as an interruption would; None runs to the end.
        """
        protocol, progress = self.protocol, Progress() if progress is None else progress
        last = protocol.steps if until is None else until
        with Checkpoints(folder, self._identity(seed)) as checkpoints:
            state, log = checkpoints.restore(start(self.network, protocol, seed))
            loss = list(log.get("loss", []))
            validation = [tuple(found) for found in log.get("validation", [])]
            with progress.bar(f"{self.version}, seed {seed}", len(loss), last) as advance:
                for number in range(len(loss), last):
                    batch = self.data.train_batch(protocol.users, seed, number)
                    state, value = self._step(state, batch)
                    loss.append(float(value))
                    done, is_last = number + 1, number + 1 == protocol.steps
                    if is_last or done % protocol.evaluate_every == 0:
                        auc, ndcg = self._validate(state.params)
                        validation.append((done, auc, ndcg))
                        progress.note(f"validation: AUC {auc:.4f}, NDCG@{evaluate.TOP} {ndcg:.4f}")
                    if is_last or done % protocol.save_every == 0:
                        checkpoints.save(state, {"loss": loss, "validation": validation})
                    advance(loss=float(np.mean(loss[-50:])))
        test = self.evaluate(state.params, self.data.test)
        return Run(state.params, loss, validation, test)

    def _validate(self, params: Any) -> tuple[float, float]:
        """AUC and NDCG of a part of the validation requests."""
        part = self.data.validation
        found = self.evaluate(params, part.take(np.arange(0, len(part.user), VALIDATED)))
        return float(found.auc.mean()), float(found.ndcg.mean())

    def evaluate(self, params: Any, chosen: Any) -> evaluate.Metrics:
        """Metrics of parameters on requests."""

        def scorer(batch: Batch) -> np.ndarray:
            return np.asarray(self._logits(params, batch))

        return evaluate.evaluate(scorer, self.data, chosen, EVALUATED)

    def _identity(self, seed: int) -> dict[str, Any]:
        """What runs must have in common for one to resume the other's checkpoint."""
        return {
            "version": self.version,
            "seed": seed,
            "sizes": dataclasses.asdict(self.sizes),
            "protocol": dataclasses.asdict(self.protocol),
        }


def load(folder: pathlib.Path, catalogue: Catalogue, step: int | None = None) -> Ranker:
    """The ranker of a checkpoint in a run's folder, whatever version trained it.

    Args:
      folder: the run's folder.
      catalogue: genres and decades of the movies that the run was trained on.
      step: the checkpoint's step; None: the newest one.

    Returns:
      The ranker, with parameters in float32.

    Raises:
      FileNotFoundError: the folder has no checkpoint, or none of this step.
      ValueError: the catalogue has another number of movies or genres than the checkpoint.
    """
    identity, _ = described(folder)
    sizes, protocol = Sizes(**identity["sizes"]), Protocol(**identity["protocol"])
    state = start(network("ikbo", sizes, catalogue), protocol, 0)
    with Checkpoints(folder, identity) as checkpoints:
        state, _ = checkpoints.restore(state, step)
    model = Ranker(sizes, catalogue, rngs=nnx.Rngs(0))
    nnx.update(model, state.params)
    return model


def described(folder: pathlib.Path) -> tuple[dict[str, Any], list[int]]:
    """What describes the run of a folder, and the steps that have a checkpoint, ascending.

    Raises:
      FileNotFoundError: the folder has no checkpoint.
    """
    # A manager would create the folder.
    if not pathlib.Path(folder).is_dir():
        raise FileNotFoundError(f"no checkpoint in {folder}")
    with Checkpoints(folder, {}) as checkpoints:
        return checkpoints.newest_identity(), checkpoints.steps()

"""Layers for Keras 3 on the JAX backend, with the parameters of the layers in `nnx`.

A layer takes the sizes of its inputs from them when it is built. The arguments are those of its
namesake in `nnx`, less the inputs' sizes, and Keras's own: `dtype` is a policy, whose compute dtype
the inputs are cast to. Candidates and users have batches of their own: use `predict_on_batch`,
`train_on_batch` or a step of your own, since `fit` and `predict` slice all inputs alike.

Importing makes JAX Keras's backend where `KERAS_BACKEND` names none, and raises ImportError where
the backend is another one. Layers raise ValueError as those in `nnx` do.
"""

import os
from typing import Any

import jax

# Keras imports TensorFlow otherwise.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras

from ikbo_jax.layers import calls, functional, parameters
from ikbo_jax.ops.dot_product_attention import visible_first

if keras.backend.backend() != "jax":
    raise ImportError(
        "ikbo_jax.layers.keras needs KERAS_BACKEND=jax, but Keras's backend is "
        f"{keras.backend.backend()!r}"
    )


def _as_int32(x: Any) -> Any:
    """Casts an index, as `keras.layers.Embedding` does.

    Keras builds a model that it loads by a call with floats alone; without it, parameters of layers
    that are not built yet are left as they were drawn.
    """
    return None if x is None else keras.ops.cast(x, "int32")


class _Layer(keras.layers.Layer):
    """Holds the parameters that `_specs` describes, and saves the attributes that `saved` names."""

    saved: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        precision: str | None = None,
        kernel_initializer: Any = "lecun_normal",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.precision = precision
        self.kernel_initializer = keras.initializers.get(kernel_initializer)

    def _make(self, specs: dict[str, parameters.Spec]) -> None:
        """Makes the parameters, which Keras may initialise later than it traces the layer."""
        for number, (name, spec) in enumerate(specs.items()):
            draw = self.kernel_initializer
            # Keras's initialisers draw the same numbers at every call. So parameters that are parts
            # of one matrix share one; every other has one of its own, with another seed.
            if not isinstance(self, LinearCompression) and hasattr(draw, "get_config"):
                config = draw.get_config()
                if isinstance(config.get("seed"), int):
                    config["seed"] += number
                draw = type(draw).from_config(config)

            def initialise(
                shape: Any, dtype: Any = None, *, spec: Any = spec, draw: Any = draw
            ) -> Any:
                del shape
                return spec.make(lambda matrix: draw(matrix, dtype=dtype))

            self.add_weight(name=name, shape=spec.shape, initializer=initialise)

    def _size(self, name: str, shape: Any, axis: int) -> int:
        """Returns a size of an input; raises ValueError unless the input has three axes."""
        if shape is None or len(shape) != 3:
            raise ValueError(
                f"{type(self).__name__}: {name} must have 3 axes, but has shape {shape}"
            )
        size: int = shape[axis]
        return size

    def _parameters(self) -> dict[str, jax.Array]:
        return {weight.name: weight.value for weight in self.weights}

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of the layer, for Keras's saved models."""
        own = {name: getattr(self, name) for name in (*self.saved, "precision")}
        init = keras.initializers.serialize(self.kernel_initializer)
        config: dict[str, Any] = super().get_config()
        return config | own | {"kernel_initializer": init}


@keras.saving.register_keras_serializable("ikbo_jax")
class LinearCompression(_Layer):
    """Implements `nnx.LinearCompression` for Keras.

    Called as `layer(e_user, e_cand, cand_to_user)`.

    Args:
      features: M, compressed rows.
    """

    saved = ("features",)

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(**options)
        self.features = features

    def build(
        self, e_user_shape: Any = None, e_cand_shape: Any = None, cand_to_user_shape: Any = None
    ) -> None:
        """Makes the parameters for inputs of these shapes; an input that is None has none."""
        del cand_to_user_shape
        rows = self._size("e_user", e_user_shape, 1), self._size("e_cand", e_cand_shape, 1)
        self._make(calls.LinearCompression._specs(self, *rows))

    def call(self, e_user: jax.Array, e_cand: jax.Array, cand_to_user: jax.Array) -> jax.Array:
        """Compresses the embeddings; arguments and result are as in `functional.compress`."""
        options = {"dtype": self.compute_dtype, "precision": self.precision}
        index = _as_int32(cand_to_user)
        return functional.compress(self._parameters(), e_user, e_cand, index, **options)


@keras.saving.register_keras_serializable("ikbo_jax")
class CandidateAttention(_Layer):
    """Implements `nnx.CandidateAttention` for Keras.

    Called as `layer(x_cand, x_user, cand_to_user)`.

    Args:
      num_heads: N.
      head_dim: H.
      out_features: width of the result; None means the width of `x_cand`.
      logit_cap: bound of the scores, as in `ikbo_jax.attention`; None: there is none.

    Rows of `x_user` that Keras's mask hides have no effect. The result has the mask of `x_cand`.
    """

    saved = ("num_heads", "head_dim", "out_features", "logit_cap")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        out_features: int | None = None,
        logit_cap: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.out_features, self.logit_cap = out_features, logit_cap
        self.supports_masking = True

    def build(
        self,
        x_cand_shape: Any = None,
        x_user_shape: Any = None,
        cand_to_user_shape: Any = None,
        lengths_shape: Any = None,
        x_user_mask_shape: Any = None,
    ) -> None:
        """Makes the parameters for inputs of these shapes; an input that is None has none."""
        del cand_to_user_shape, lengths_shape, x_user_mask_shape
        width = self._size("x_cand", x_cand_shape, 2)
        user_width = self._size("x_user", x_user_shape, 2)
        self._make(calls.CandidateAttention._specs(self, width, user_width))

    def compute_output_shape(
        self, x_cand_shape: Any, *of_others: Any, **named: Any
    ) -> tuple[Any, ...]:
        """Returns the shape of the result, also where sizes of the inputs are None."""
        del of_others, named
        return *x_cand_shape[:2], self.out_features or x_cand_shape[2]

    def call(
        self,
        x_cand: jax.Array,
        x_user: jax.Array,
        cand_to_user: jax.Array,
        lengths: jax.Array | None = None,
        x_user_mask: jax.Array | None = None,
    ) -> jax.Array:
        """Attends as `functional.attend`; `lengths` are its `key_value_seq_lengths`.

        Keras passes the mask [U, S] of `x_user`; attention does not depend on the order of rows.
        """
        if x_user_mask is not None:
            if x_user_mask.shape != x_user.shape[:2]:
                raise ValueError(
                    f"x_user_mask has shape {x_user_mask.shape} but x_user has {x_user.shape}"
                )
            rows = x_user[:, :, None]
            lengths, rows = visible_first(x_user_mask, _as_int32(lengths), rows)
            x_user = rows[:, :, 0]
        return functional.attend(
            *(self._parameters(), x_cand, x_user, _as_int32(cand_to_user)),
            key_value_seq_lengths=_as_int32(lengths),
            logit_cap=self.logit_cap,
            dtype=self.compute_dtype,
            precision=self.precision,
        )

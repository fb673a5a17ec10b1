"""HSTU: both versions agree, and training lowers the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from movielens_files import MOVIES

from examples.hstu import __main__ as command
from examples.hstu.model import Sizes
from examples.movielens import data, train
from examples.movielens.impressions import Impressions

SIZES = Sizes(movies=MOVIES + 1, history=32, layers=1, width=8, heads=2, head_dim=4)
PROTOCOL = train.Protocol(steps=60, users=4)


@pytest.fixture(scope="module")
def impressions(folder):
    return Impressions(data.load(folder), SIZES.history)


def test_versions_compute_the_same_logits_and_gradients(impressions):
    batch = impressions.train_batch(4, 0, 0)
    lengths = np.asarray(batch.users.length)
    assert lengths.min() < lengths.max()
    found = {}
    for version in command.VERSIONS:
        trainer = command.Trainer(version, SIZES, PROTOCOL)
        tokens = trainer.tokens(batch)

        def loss(params, trainer=trainer, tokens=tokens):
            logits = trainer.network.logits(params, tokens)
            return jnp.mean(jax.nn.softplus(logits) - tokens.label * logits), logits

        found[version] = jax.jit(jax.grad(loss, has_aux=True))(trainer.network.start(3))
    (ours, logits), (plain, plain_logits) = found["ikbo"], found["plain"]
    np.testing.assert_allclose(logits, plain_logits, atol=1e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
        assert np.abs(b).max() > 0, "a parameter has no effect"


def test_training_lowers_the_loss(impressions):
    with jax.numpy_dtype_promotion("standard"):
        loss, metrics = command.Trainer("ikbo", SIZES, PROTOCOL).run(impressions, 0)
    assert np.mean(loss[-10:]) < np.mean(loss[:10]) - 0.05
    assert np.isfinite(metrics.auc).all()


def test_the_command_refuses_what_it_cannot_read(tmp_path, capsys):
    assert command.main(["--data", str(tmp_path)]) == 2
    assert "(GroupLens) nor" in capsys.readouterr().err
    for flag, value, words in (("--steps", "0", "not a positive"), ("--seeds", "-1", "negative")):
        with pytest.raises(SystemExit):
            command.main([flag, value])
        assert words in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_compares_both_versions(folder, monkeypatch, capsys):
    small = SIZES, dataclasses.replace(PROTOCOL, steps=2)
    monkeypatch.setitem(command.SIZES, "small", small)
    with jax.numpy_dtype_promotion("standard"):
        assert command.main(["--data", str(folder), "--seeds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "ikbo" in printed
    assert "plain" in printed
    assert "nan" not in printed

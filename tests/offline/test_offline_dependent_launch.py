"""Dependent launches compiled for sm_90a: the launch's attribute, and the wait before all else."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import offline
import pytest

from ikbo_jax.pallas.flash import attention, gdpa_forward, tile_list
from ikbo_jax.pallas.linear_compression import kernel
from ikbo_jax.problems import AttentionConfig, GdpaConfig, LinearCompressionConfig
from ikbo_jax.problems.packed_compression import PackedCompressionConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the CUDA plugin is for Linux"),
]

NUM_SMS = 132
#: What reads or writes device memory.
ACCESSES = r"\b(?:cp\.async\.bulk|(?:ld|st)\.(?:global|acquire|relaxed|release)|atom\.|red\.)"


def of(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


INDEX = of(256, dtype=jnp.int32)
HEADS, KEYS = of(256, 64, 2, 128), of(4, 1024, 2, 128)
ROWS = of(16384, 2, 128)
WORDS, COUNTS = of(200, tile_list.TILE_WORDS, dtype=jnp.int32), of(2, dtype=jnp.int32)


def compress(config: Any, n: int) -> tuple[Any, ...]:
    def fn(*arrays: Any) -> Any:
        weights, embeddings, index = arrays[:2], arrays[2:4], arrays[4]
        return kernel.linear_compression_kernel(
            weights, embeddings, (None, index), config=config, num_sms=NUM_SMS
        )

    return fn, of(433, 1178), of(433, 866), of(4, 1178, n), of(256, 866, n), INDEX


def attend(config: Any) -> tuple[Any, ...]:
    def fn(*arrays: Any) -> Any:
        return attention.attention_kernel(
            *(*arrays, None),
            scale=0.1,
            order=None,
            return_residuals=False,
            config=config,
            num_sms=NUM_SMS,
        )[0]

    return fn, HEADS, KEYS, KEYS, INDEX


def activate(config: Any) -> tuple[Any, ...]:
    def fn(query: Any, key: Any, value: Any, words: Any, counts: Any) -> Any:
        return gdpa_forward.gdpa_forward(
            *(query, key, value, tile_list.TileList(words, counts)),
            activations=("gelu",),
            approx=None,
            config=config,
            out_rows=ROWS.shape[0],
            scale=0.1,
            output_scale=1.0,
            num_sms=NUM_SMS,
        )

    return fn, ROWS, of(512, 2, 128), of(512, 2, 128), WORDS, COUNTS


#: A configuration, and the function of it that gives a kernel's host function and its shapes.
CASES: dict[str, tuple[Any, Callable[[Any], tuple[Any, ...]]]] = {
    "linear_compression": (LinearCompressionConfig(), lambda config: compress(config, 256)),
    "linear_compression_packed": (
        PackedCompressionConfig(single_launch=False),
        lambda config: compress(config, 32),
    ),
    "attention": (AttentionConfig(), attend),
    "gdpa": (GdpaConfig(v_stages=2), activate),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[offline.Compiler]:
    """Its log has the code that launches a kernel, too."""
    try:
        found = offline.Compiler(tmp_path_factory.mktemp("dependent"), dumps=("HOST_LLVM",))
    except offline.OfflineUnavailableError as error:
        pytest.fail(str(error), pytrace=False)
    with contextlib.closing(found):
        yield found


@pytest.mark.parametrize("name", CASES)
def test_launch_has_the_attribute_and_waits_first(name: str, compiler: offline.Compiler) -> None:
    config, launch = CASES[name]
    dependent = dataclasses.replace(config, dependent_launch=True)
    modules = offline.mosaic_modules(*launch(dependent))
    assert len(modules) == 1 + (name == "linear_compression_packed")
    for module in modules:
        log = compiler.log_of(module)
        assert not offline.CompiledKernel("", 0, offline.parse_ptxas_log(log)).faults
        # Whether the launch is dependent, before the stream and the kernel's arguments.
        assert re.search(r"call \w+ @mosaic_gpu_launch_kernel\(.*, i32 1, ptr \S+, ptr \S+\)", log)
        wait, trigger = (
            [found.start() for found in re.finditer(rf"griddepcontrol\.{word};", log)]
            for word in ("wait", "launch_dependents")
        )
        assert len(wait) == len(trigger) == 1
        body = log.index(".entry")
        first = re.search(ACCESSES, log[body:])
        assert first is not None
        assert body < wait[0] < trigger[0] < body + first.start()


@pytest.mark.parametrize("name", CASES)
def test_launch_is_not_dependent_by_default(name: str) -> None:
    config, launch = CASES[name]
    assert config.dependent_launch is False
    for module in offline.mosaic_modules(*launch(config)):
        text = offline.module_text(module)
        assert "griddepcontrol" not in text
        assert "uses_pdl" not in text

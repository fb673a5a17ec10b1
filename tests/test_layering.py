"""Who may import whom: walks the syntax trees, imports inside functions included."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import ikbo_jax

ROOT = pathlib.Path(ikbo_jax.__file__).parent.parent
PACKAGE = "ikbo_jax"
#: Kernel files share these small parts, and nothing else.
SMALL_PARTS = (
    "pallas.mosaic",
    "pallas.accumulator",
    "pallas.fragment",
    "pallas.schedule",
    "pallas.softmax",
    "pallas.stores",
    "pallas.turns",
)
#: A kernel too long for one file is split; these parts are its own.
LINEAR_COMPRESSION_PARTS = ("pallas.linear_compression_tiles", "pallas.linear_compression_roles")
ATTENTION_PARTS = (
    "pallas.attention_context",
    "pallas.attention_consumer",
    "pallas.attention_producer",
    "pallas.work_order",
)
#: Parts of the generalised attention's kernels, forward and backward.
GDPA_SMALL_PARTS = ("pallas.activations", "pallas.tile_list", "pallas.gdpa_weights")
GDPA_FORWARD_PARTS = ("pallas.gdpa_context", "pallas.gdpa_consumer", "pallas.gdpa_producer")
GDPA_BACKWARD_PARTS = (
    "tuning.configs",
    "tuning.gdpa_backward_configs",
    "reference.jagged",
    "pallas.mosaic",
    "pallas.accumulator",
    "pallas.softmax",
    "pallas.stores",
    "pallas.gdpa_weights",
    "pallas.gdpa_slopes",
    "pallas.gdpa_backward_tiles",
    "pallas.gdpa_backward_context",
    "pallas.gdpa_backward_store",
    "pallas.gdpa_backward_product",
)
GDPA_CONFIGS = ("tuning.configs", "tuning.gdpa_configs")
OPS = ("ops", "reference", "pallas", "tuning")
#: What a module may import of this package, by the longest prefix of its name that stands here. The
#: autotuner's modules stand above the kernels that they time, although they live beside the table.
ALLOWED: dict[str, tuple[str, ...]] = {
    "_version": (),
    "_timing": (),
    "_timing.programs": ("_timing.executables",),
    "debug": (),
    "reference": (),
    "reference.attention_grouped": ("reference.attention",),
    "reference.gdpa": ("reference.activations",),
    "reference.gdpa_chunked": (
        "reference.gdpa",
        "reference.jagged",
        "reference.activations",
        "reference.attention",
    ),
    "tuning": (),
    "tuning.configs": (),
    "tuning.gdpa_configs": ("tuning.configs",),
    "tuning.gdpa_backward_configs": ("tuning.configs",),
    "tuning.rules": GDPA_CONFIGS,
    "tuning.table": ("tuning.configs", "tuning.rules"),
    "tuning.trials": ("tuning.configs", "pallas", "reference"),
    "tuning.trials_gdpa": (*GDPA_CONFIGS, "tuning.trials", "pallas", "reference"),
    "tuning.bench": ("tuning", "_timing"),
    "tuning.worker": ("tuning.bench",),
    "tuning.session": ("tuning.bench", "tuning.worker", "tuning.rules"),
    "tuning.contest": ("tuning",),
    "tuning.autotune": ("tuning",),
    "pallas": ("tuning.configs", *SMALL_PARTS),
    "pallas.linear_compression": ("tuning.configs", *SMALL_PARTS, *LINEAR_COMPRESSION_PARTS),
    "pallas.linear_compression_roles": (
        "tuning.configs",
        *SMALL_PARTS,
        "pallas.linear_compression_tiles",
    ),
    "pallas.mosaic": (),
    "pallas.schedule": (),
    "pallas.fragment": ("pallas.mosaic",),
    "pallas.accumulator": ("pallas.mosaic",),
    "pallas.softmax": ("pallas.mosaic",),
    "pallas.stores": ("pallas.mosaic", "pallas.softmax"),
    "pallas.turns": (
        "tuning.configs",
        "pallas.mosaic",
        "pallas.accumulator",
        "pallas.softmax",
    ),
    "pallas.attention": (
        "tuning.configs",
        *SMALL_PARTS,
        *ATTENTION_PARTS,
        "pallas.tile_list",
    ),
    "pallas.attention_context": ("tuning.configs",),
    "pallas.attention_producer": (
        "tuning.configs",
        "pallas.attention_context",
        "pallas.tile_list",
        *SMALL_PARTS,
    ),
    "pallas.attention_store": (
        "tuning.configs",
        "pallas.attention_context",
        "pallas.softmax",
        "pallas.stores",
    ),
    "pallas.attention_consumer": (
        "tuning.configs",
        "pallas.attention_context",
        "pallas.attention_store",
        *SMALL_PARTS,
    ),
    "pallas.work_order": ("tuning.configs",),
    "pallas.activations": ("reference.activations",),
    "pallas.tile_list": (),
    "pallas.gdpa_backward": (
        *GDPA_BACKWARD_PARTS,
        "pallas.gdpa_backward_producer",
        "pallas.gdpa_backward_consumer",
    ),
    "pallas.gdpa_backward_producer": GDPA_BACKWARD_PARTS,
    "pallas.gdpa_backward_consumer": GDPA_BACKWARD_PARTS,
    "pallas.gdpa_slopes": (
        "reference.activations",
        "pallas.activations",
        "pallas.gdpa_weights",
    ),
    "pallas.gdpa_backward_tiles": (
        "tuning.gdpa_backward_configs",
        "reference.jagged",
        "pallas.tile_list",
    ),
    "pallas.gdpa_backward_context": (
        "tuning.configs",
        "tuning.gdpa_backward_configs",
        "pallas.gdpa_weights",
    ),
    "pallas.gdpa_backward_store": ("pallas.mosaic", "pallas.softmax", "pallas.stores"),
    "pallas.gdpa_backward_product": ("pallas.mosaic", "pallas.accumulator"),
    "pallas.gdpa": (
        "tuning.gdpa_configs",
        "reference.gdpa",
        "reference.activations",
        "pallas.attention",
        "pallas.gdpa_forward",
        "pallas.tile_list",
    ),
    "pallas.gdpa_forward": (
        *GDPA_CONFIGS,
        *SMALL_PARTS,
        *GDPA_SMALL_PARTS,
        *GDPA_FORWARD_PARTS,
    ),
    "pallas.gdpa_weights": ("pallas.activations", "reference.activations"),
    "pallas.gdpa_context": (*GDPA_CONFIGS, "pallas.gdpa_weights", "pallas.schedule"),
    "pallas.gdpa_producer": (
        *GDPA_CONFIGS,
        *SMALL_PARTS,
        "pallas.tile_list",
        "pallas.gdpa_context",
    ),
    "pallas.gdpa_consumer": (
        *GDPA_CONFIGS,
        *SMALL_PARTS,
        "pallas.gdpa_weights",
        "pallas.gdpa_context",
        "pallas.gdpa_store",
    ),
    "pallas.gdpa_store": (
        "tuning.configs",
        "pallas.softmax",
        "pallas.stores",
        "pallas.tile_list",
        "pallas.gdpa_weights",
        "pallas.gdpa_context",
    ),
    "ops": OPS,
    "rewrite": ("rewrite", *OPS),
    "layers": ("layers", "ops", "tuning.configs"),
    "models": ("models", "layers", "ops", "tuning.configs"),
    "demo": (*OPS, "debug", "_timing", "models", "layers", "rewrite"),
    "demo_attention": (*OPS, "demo", "_timing"),
    "demo_ranking": (*OPS, "demo", "_timing", "models", "rewrite"),
    "terminal": (),
    "cli_demo": ("terminal", "demo", "demo_attention", "demo_ranking", "_version"),
    "cli": (
        *OPS,
        "debug",
        "demo",
        "demo_attention",
        "demo_ranking",
        "cli_demo",
        "terminal",
        "_timing",
        "_version",
        "models",
        "layers",
        "rewrite",
    ),
    "__main__": ("cli",),
    "": (*OPS, "debug", "rewrite", "_version"),
}


def modules() -> dict[str, pathlib.Path]:
    """Every module of the package, by its name without the package's: "" is the package itself."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(source: str, name: str, is_package: bool) -> set[str]:
    """Full names of all that the module `name` imports."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *filter(None, name.split("."))]
                up = here[: len(here) - node.level + is_package]
                base = ".".join([*up, *filter(None, [node.module])])
            for alias in node.names:
                # `from package import module` imports the module, not only the package.
                inner = f"{base}.{alias.name}".removeprefix(f"{PACKAGE}.")
                names.add(f"{PACKAGE}.{inner}" if inner in MODULES else base)
    return names


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def rule_of(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next(ALLOWED[prefix] for prefix in prefixes if prefix in ALLOWED)


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    found = []
    for target in sorted(imported(source, name, is_package)):
        top, _, inner = target.partition(".")
        if top == PACKAGE:
            if not any(under(inner, allowed) for allowed in rule_of(name)):
                found.append(f"{name or PACKAGE} imports {target}")
        elif under(name, "reference") and top != "jax" and top not in sys.stdlib_module_names:
            found.append(f"{name} imports {target}, but reference imports jax alone")
    return found


@pytest.mark.parametrize("name", MODULES, ids=lambda name: name or PACKAGE)
def test_module_imports_only_what_its_layer_may(name: str) -> None:
    path = MODULES[name]
    assert violations(path.read_text(), name, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reference.attention", "import numpy as np"),
        ("reference.attention", "from ikbo_jax.tuning import configs"),
        ("pallas.attention", "from ikbo_jax.pallas import linear_compression"),
        ("pallas.attention", "from . import linear_compression"),
        ("pallas.attention", "from ..ops import dispatch"),
        ("pallas.attention", "def f():\n    from ikbo_jax.tuning.table import lookup"),
        ("tuning.table", "import ikbo_jax.pallas.mosaic"),
        ("ops.attention", "import ikbo_jax"),
        ("ops.attention", "from ikbo_jax import cli"),
    ],
)
def test_rule_finds_violations(name: str, source: str) -> None:
    assert len(violations(source, name)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reference.attention", "import functools\nimport jax.numpy as jnp"),
        ("pallas.attention", "from ikbo_jax.pallas import mosaic\nfrom . import mosaic"),
        ("pallas.attention", "from ikbo_jax.tuning.configs import WGMMA_M"),
        ("ops.attention", "from ikbo_jax.ops import dispatch\nfrom ..tuning import table"),
    ],
)
def test_rule_permits_what_the_layers_need(name: str, source: str) -> None:
    assert violations(source, name) == []


def test_importing_the_package_stays_cheap() -> None:
    # Mosaic GPU costs 0.3 s, and only a machine with a Hopper GPU needs it.
    code = (
        f"import sys, {PACKAGE}\n"
        "heavy = ('jax.experimental.mosaic', 'jax.experimental.pallas', 'rich', 'flax')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr

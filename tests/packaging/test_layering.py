"""Who may import whom: walks the syntax trees, imports inside functions included."""

import subprocess
import sys

import pytest

from tools.import_graph import MODULES, PACKAGE, PAGE, ROOT, drawn, imported, room

#: The rooms that a room may import, besides itself. A room stands above the rooms that it imports.
KERNEL_PARTS = ("problems", "reference", "pallas.hopper", "pallas.activations", "pallas.worklist")
KERNELS = (
    "pallas.attention_backward",
    "pallas.few_queries",
    "pallas.flash",
    "pallas.gdpa_backward",
    "pallas.linear",
    "pallas.linear_compression",
    "pallas.linear_compression_backward",
    "pallas.look_up",
    "pallas.worklist",
)
REWRITE_PARTS = ("rewrite.values", "rewrite.facts", "rewrite.report", "rewrite.interpret")
REWRITERS = ("rewrite.rules", "rewrite.attention", "rewrite.calls")
OPS = ("integers", "problems", "reference", "masks", "tuning", *KERNELS)
ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("_version", "_timing", "integers"), ()),
    "placement": ("integers",),
    "debug": ("integers",),
    "masks": ("integers", "reference"),
    "problems": (),
    "reference": (),
    # Models reach it as arguments.
    "serving": (),
    "pallas": (),
    "pallas.hopper": ("problems",),
    "pallas.activations": ("reference", "pallas.hopper"),
    "pallas.worklist": ("problems", "reference", "pallas.hopper"),
    "pallas.flash": KERNEL_PARTS,
    "pallas.attention_backward": (*KERNEL_PARTS, "pallas.gdpa_backward"),
    "pallas.few_queries": (*KERNEL_PARTS, "pallas.flash"),
    "pallas.gdpa_backward": KERNEL_PARTS,
    "pallas.linear": ("problems", "reference", "pallas.hopper", "pallas.activations"),
    "pallas.linear_compression": ("problems", "pallas.hopper"),
    "pallas.linear_compression_backward": ("problems", "pallas.hopper", "pallas.worklist"),
    "pallas.look_up": ("problems", "pallas.hopper", "pallas.worklist"),
    "tuning": ("problems",),
    "ops": OPS,
    "rewrite.values": ("ops",),
    "rewrite.facts": ("rewrite.values",),
    "rewrite.report": ("ops", "rewrite.values"),
    "rewrite.interpret": ("rewrite.values", "rewrite.report"),
    "rewrite.rules": REWRITE_PARTS,
    "rewrite.attention": ("masks", "ops", *REWRITE_PARTS, "rewrite.rules"),
    "rewrite.calls": ("ops", *REWRITE_PARTS, "rewrite.rules", "rewrite.attention"),
    "rewrite.primitives": ("rewrite.values", *REWRITERS),
    "rewrite": (*REWRITE_PARTS, *REWRITERS, "rewrite.primitives"),
    "layers": ("integers", "ops", "masks"),
    "models": ("ops", "layers"),
    "cases": (*OPS, "ops", "models"),
    # The table stands below the ops; the tuner times the kernels themselves.
    "autotuner": ("problems", "tuning", "ops", "cases", "_timing"),
    # Imports the tuner and the timing where it runs them.
    "measure": ("integers", "problems", "tuning", "ops", "autotuner", "_timing"),
    "cli": (
        *(*OPS, "ops", "cases", "autotuner", "rewrite", "layers", "models"),
        *("debug", "_timing", "_version"),
    ),
    PACKAGE: (*("ops", "rewrite", "placement", "debug", "masks", "measure", "tuning", "_version"),),
}
#: Modules that may import less than their room.
STRICTER: dict[str, tuple[str, ...]] = {"ops.reverse_only": ()}


def violations(source: str, name: str, is_package: bool = False) -> list[str]:
    found = []
    for target in sorted(imported(source, name, is_package)):
        top, _, inner = target.partition(".")
        if top == PACKAGE:
            allowed = STRICTER.get(name, (room(name), *ALLOWED[room(name)]))
            if room(inner) not in allowed and inner != name:
                found.append(f"{name or PACKAGE} imports {target}")
        elif room(name) == "reference" and top != "jax" and top not in sys.stdlib_module_names:
            found.append(f"{name} imports {target}, but reference imports jax alone")
    return found


def test_modules_import_only_what_their_rooms_may() -> None:
    assert len(MODULES) > 100
    for name, path in MODULES.items():
        assert violations(path.read_text(), name, path.name == "__init__.py") == []


def test_no_room_imports_upwards() -> None:
    """The table has no cycle: rooms can be stacked so that every arrow points down."""
    above: dict[str, set[str]] = {name: set(below) for name, below in ALLOWED.items()}
    while above:
        ground = {name for name, below in above.items() if not below & above.keys()}
        assert ground, f"a cycle among {sorted(above)}"
        above = {name: below for name, below in above.items() if name not in ground}


def test_the_drawn_graph_is_the_tree_s() -> None:
    page = PAGE.read_text()
    assert page == drawn(page), "python tools/import_graph.py draws it"
    for name in ALLOWED:
        assert f"`{name}" in page or name in ("pallas", PACKAGE), f"{name} has no paragraph"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("reference.attention", "import numpy as np"),
        ("reference.attention", "from ikbo_jax.problems import AttentionConfig"),
        ("pallas.flash.attention", "from ikbo_jax.pallas.linear_compression import kernel"),
        ("pallas.flash.attention", "from ...ops import dispatch"),
        ("pallas.flash.attention", "def f():\n    from ikbo_jax.tuning.table import lookup"),
        ("pallas.hopper.mosaic", "from ikbo_jax.pallas.flash import softmax"),
        ("tuning.table", "import ikbo_jax.pallas.hopper.mosaic"),
        ("problems.attention", "from ikbo_jax.tuning import table"),
        ("rewrite.values.forms", "from ikbo_jax.rewrite.rules import reshape"),
        ("rewrite.rules.row_rules", "from ikbo_jax.rewrite.calls import loops"),
        ("rewrite.rules.sources", "from ikbo_jax.rewrite.primitives import LAZY"),
        ("ops.attention", "import ikbo_jax"),
        ("ops.attention", "from ikbo_jax import cli"),
    ],
)
def test_rule_finds_violations(name: str, source: str) -> None:
    assert len(violations(source, name)) == 1


def test_importing_the_package_stays_cheap_and_keeps_no_programs() -> None:
    # Mosaic GPU costs 0.3 s, and only a machine with a Hopper GPU needs it.
    code = (
        f"import sys, {PACKAGE}\n"
        "heavy = ('jax.experimental.mosaic', 'jax.experimental.pallas', 'rich', 'flax')\n"
        "print([name for name in heavy if name in sys.modules])\n"
        f"import jax, {PACKAGE}.cli\n"
        "print(jax.config.jax_compilation_cache_dir)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "None"]
